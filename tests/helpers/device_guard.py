"""A pytest plugin for GPU tests: after an illegal access nothing works in that process, so it ends, and others go on.

The test during which it happened is reported as an error. With pytest-xdist that worker alone ends: it is replaced, and
the tests that it still had are given to the others (xdist reports the failed test once more, as a crashed worker).
Without xdist the run ends there.
"""

import os
import sys

import pytest

BROKEN = pytest.StashKey[str]()
HOARD = 2 * 2**30  # bytes of device memory that a worker may keep for itself between two tests


@pytest.fixture(autouse=True)
def _device_answers(request):
    """What a test launched has run when it ends, so that a failure on the device is that test's."""
    yield
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > HOARD:
            torch.cuda.empty_cache()
    except RuntimeError as error:
        request.config.stash[BROKEN] = f"the GPU does not answer any more after {request.node.nodeid}"
        pytest.fail(f"the GPU does not answer any more after this test: {error}; its process ends here", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Ends a process whose device is broken, once the reports of that test have been sent."""
    done = yield
    if BROKEN in item.config.stash:
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        item.session.shouldstop = item.config.stash[BROKEN]
    return done
