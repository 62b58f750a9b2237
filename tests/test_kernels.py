"""Kernels that are forked are kernels as any other."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kernels
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import local_provisioner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@contextmanager
def started(folder: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """Start a kernel in a folder."""
    manager = KernelManager()
    manager.start_kernel(cwd=str(folder), env={**os.environ, "MARK": folder.name})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert not manager.is_alive()


def said(client: BlockingKernelClient, code: str) -> str:
    """Run code; return what it prints."""
    lines: list[str] = []

    def note(message: dict[str, dict[str, str]]) -> None:
        lines.append(message["content"].get("text", ""))

    client.execute_interactive(code, timeout=60, output_hook=note)
    return "".join(lines).strip()


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_provisioner, "launch_kernel", kernels.launch)


@pytest.mark.usefixtures("forking")
def test_a_forked_kernel_is_as_one_that_was_started(tmp_path: Path) -> None:
    names = "import os, random, sys; print(os.getcwd(), os.environ['MARK'])"
    known = "print('torch' in sys.modules, 'torch' in globals(), 'random' in globals())"
    with started(tmp_path) as (manager, client), started(tmp_path.parent) as (_, other):
        provisioner: Any = manager.provisioner
        assert isinstance(provisioner.process, kernels.Forked)
        assert said(client, known) == ""  # an error: nothing is imported for the notebook
        assert said(client, names) == f"{tmp_path} {tmp_path.name}"
        assert said(other, names) == f"{tmp_path.parent} {tmp_path.parent.name}"
        assert said(client, known) == "True False True"
        drawn = [said(each, "print(random.random())") for each in (client, other)]
        wait = "import time; open('begun', 'w').close(); time.sleep(60)"
        client.execute(wait, stop_on_error=False)  # or what comes at once may be dropped, too
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        manager.interrupt_kernel()
        assert client.get_shell_msg(timeout=60)["content"]["ename"] == "KeyboardInterrupt"
        assert said(client, "print('alive')") == "alive"
    assert drawn[0] != drawn[1]


@pytest.mark.usefixtures("forking")
def test_a_forked_kernel_that_is_killed_is_noticed(tmp_path: Path) -> None:
    with started(tmp_path) as (manager, client):
        client.execute("import os; os.kill(os.getpid(), 9)")
        provisioner: Any = manager.provisioner
        assert provisioner.process.wait() == -9
        assert not manager.is_alive()
