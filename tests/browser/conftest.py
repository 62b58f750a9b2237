"""A browser, and the built book on a local address."""

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build" / "html"
sys.path.insert(0, str(ROOT / "book" / "_ext"))
NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
APPLICATIONS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


def cannot(reason: str) -> None:
    """Say why the browser tests do not run: a failure where CI must run them."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI must run the browser tests", pytrace=False)
    pytest.skip(reason)


def found() -> str | None:
    """Return the path of a Chromium on this machine."""
    if chosen := os.environ.get("CHROMIUM"):
        return chosen
    for name in NAMES:
        if path := shutil.which(name):
            return path
    return next((path for path in APPLICATIONS if Path(path).exists()), None)


def install() -> None:
    """Install Chromium where the user is root on Debian; quietly, and it may fail."""
    if getattr(os, "geteuid", lambda: 1)() != 0 or shutil.which("apt-get") is None:
        return
    import fcntl  # not on Windows

    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["install", "-y", "--no-install-recommends", "fonts-dejavu-core"]
    with open(HTML.parent / "chromium.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # apt-get refuses a second one beside it
        if found() is not None:  # another worker has installed it
            return
        # The first is smaller and quicker; not every distribution has it.
        for command in (["update"], *([*install, name] for name in NAMES[:2])):
            if found() is None:
                subprocess.run(
                    ["apt-get", "-qq", *command], env=environment, capture_output=True, check=False
                )


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """Serve the built book on the loopback interface."""
    if not (HTML / "index.html").exists():
        pytest.fail("there is no built book: run `make book` first", pytrace=False)

    class Quiet(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # one connection for many files

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # the usual five are fewer than a page opens at once

    handler = functools.partial(Quiet, directory=str(HTML))
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start a Chromium; skip, or fail in CI, where there is none."""
    if found() is None:
        install()
    if (path := found()) is None:
        cannot("no Chromium found: install one, or set CHROMIUM to its path")
    with sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            cannot(f"{path} does not start: {str(error).splitlines()[0]}")
        yield running
        running.close()
