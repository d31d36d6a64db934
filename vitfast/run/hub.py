"""Whether the Hugging Face hub answers: its own libraries try for minutes, again for each file."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from ..errors import InputError, both_ends

CHECK = "check the name and the network, and set HF_TOKEN for what is private or gated"  # said where the hub refuses


def unreachable(lacking: str, why: str) -> InputError:
    """The error for what the hub's cache lacks while the hub does not answer; `why` is from `silence`."""
    from huggingface_hub import constants

    advice = "check the network, proxy, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local folder"
    return InputError(f"{lacking} in the hub's cache, and {constants.ENDPOINT} gives no answer ({why}); {advice}")


def silence(path: str) -> str:
    """Why the hub gives no answer about a path, in one line; "" where it does. It is asked once a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return _ask(f"{constants.ENDPOINT}/{path}", time.monotonic() // 60)


@lru_cache(maxsize=1)
def _ask(url: str, minute: float) -> str:
    """`silence` about an address. A thread asks, since the look-up of a host's name may take longer."""
    from huggingface_hub.utils import get_session

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", 4))
    found = [f"none in {seconds:g} s; HF_HUB_ETAG_TIMEOUT=30 waits for longer"]

    def ask() -> None:
        try:
            status = get_session().head(url, timeout=seconds).status_code
            found.append(f"status {status}" if status in (407, 429) or status >= 500 else "")
        except Exception as error:  # each library raises errors of its own
            found.append(both_ends(f"{type(error).__name__}: {error}", 160))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[-1]


@contextmanager
def cache_alone() -> Iterator[None]:
    """A context in which Hugging Face's datasets use their cache and no network."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
