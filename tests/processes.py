"""Start programs in several processes, as torchrun does."""

import os
import subprocess
import sys


def torchrun(size: int, *words: str) -> None:
    """Run a program in several processes of one thread, and see that it ends well."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={size}", *words),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
