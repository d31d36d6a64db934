"""The address of the repository that this copy comes from, which setup.py and the site link."""

import re
import subprocess
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parent.parent


def web_address(remote: str) -> str | None:
    """The address in a browser of a git remote, without a password; None for a folder."""
    remote = re.sub(r"^(?:ssh://git@([^:/]+)(?::\d+)?/|git@([^:/]+):)", r"https://\1\2/", remote.strip())
    host = re.fullmatch(r"https?://(?:[^/]*@)?(.+?)(?:\.git)?/?", remote)
    return f"https://{host[1]}" if host else None


def links() -> dict[str, str]:
    """The project's links by their names: those that an sdist recorded, or those of a clone's origin."""
    if (recorded := ROOT / "PKG-INFO").is_file():
        lines = message_from_bytes(recorded.read_bytes()).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    try:
        command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
        address = web_address(subprocess.run(command, capture_output=True, text=True).stdout)
    except OSError:  # there is no git
        address = None
    pages = {"Source": "", "Documentation": "#readme", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
    return {name: address + page for name, page in pages.items()} if address else {}
