"""A notebook runs where the package is missing, as on Colab: its first code cell installs it."""

import http.server
import json
import subprocess
import threading
from pathlib import Path
from urllib.parse import quote

import colab
import export
import nbformat
import pytest
from colab import install
from environments import closure, copy_project, make, offline, pack
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

# As on Colab, which has more.
SHIPPED = (
    "torch", "numpy", "matplotlib", "pandas", "spacy", "ipykernel", "pip",
    "altair", "lxml", "requests", "seaborn", "sentencepiece", "tokenizers",
)  # fmt: skip
NOTEBOOK = "book/training/loop.ipynb"
ADDRESS = "https://github.com/someone/book"
GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@example.org")


class Kernel(AsyncKernelManager):
    """A kernel of another Python."""

    python = Path()

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        """Return the command that starts the kernel."""
        return [str(self.python), "-m", "ipykernel_launcher", "-f", self.connection_file]


def run(notebook: NotebookNode, folder: Path, python: Path, env: dict[str, str]) -> None:
    """Run a notebook in a folder; an exception is that of the cell that failed."""
    client = NotebookClient(
        notebook,
        kernel_manager_class=type("OtherKernel", (Kernel,), {"python": python}),
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=env)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone of the project as it is now, with one commit."""
    folder = copy_project(tmp_path / "clone")
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    return folder


def test_notebook_installs_what_it_needs_and_runs(
    tmp_path: Path, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = closure(SHIPPED)
    python = make(tmp_path / "colab", shipped.values())
    (wheels := tmp_path / "wheels").mkdir()
    needed = closure([f"annotated-transformer[{colab.EXTRAS}]"]) | closure(["setuptools"])
    for name in needed.keys() - shipped.keys() - {"annotated-transformer"} | {"setuptools"}:
        pack(needed[name], wheels)
    env = offline(wheels)
    notebook = nbformat.read(clone / NOTEBOOK, as_version=4)
    run(notebook, (clone / NOTEBOOK).parent, python, env)
    # As published it lies in no clone, and installs from the address that was filled in.
    uninstall = [str(python), "-m", "pip", "uninstall", "-qy", "annotated-transformer"]
    subprocess.run(uninstall, env=env, check=True)
    (nowhere := tmp_path / "content").mkdir()
    monkeypatch.setenv("BOOK_REPOSITORY_URL", ADDRESS)
    monkeypatch.setenv("BOOK_REPOSITORY_COMMIT", "main")
    assert export.main(["--publish", str(tmp_path / "pages")]) == 0
    notebook = nbformat.read(tmp_path / "pages" / NOTEBOOK, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source += "\nfrom importlib.util import find_spec"
    first.source += "\nassert find_spec('annotated_transformer.training.loop')"
    notebook.cells = [first]
    key = f"url.{clone.as_uri()}.insteadOf"
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": key, "GIT_CONFIG_VALUE_0": ADDRESS}
    run(notebook, nowhere, python, env | git)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in an empty folder, without the package; return what pip will be asked to install."""
    asked: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command[-1]))
    for name in ("COLAB_JUPYTER_IP", "KMP_TARGET_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return asked


@pytest.mark.parametrize("where", [".", "book/model", "..", "../here"])
def test_clone_comes_before_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: list[str], where: str
) -> None:
    clone = tmp_path / "here"
    (clone / "annotated_transformer").mkdir()
    (clone / "annotated_transformer/__init__.py").touch()
    (clone / "pyproject.toml").touch()
    (clone / "book/model").mkdir(parents=True)
    monkeypatch.chdir(clone / where)
    install("plots", ADDRESS)
    assert bare == [f"annotated-transformer[plots] @ {clone.as_uri()}"]


class Colab(http.server.BaseHTTPRequestHandler):
    """What Colab's machine says of the notebook that it has opened."""

    opened = f"{ADDRESS}/blob/mine/book/model/attention.ipynb"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        path = f"fileId={quote(self.opened, safe='')}"
        self.wfile.write(json.dumps([{"name": "attention.ipynb", "path": path}]).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_notebook_of_a_fork_installs_the_fork(
    monkeypatch: pytest.MonkeyPatch, bare: list[str]
) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Colab) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
        monkeypatch.setenv("KMP_TARGET_PORT", str(server.server_port))
        install("plots", "")
    assert bare == [f"annotated-transformer[plots] @ git+{ADDRESS}@mine"]


def test_notebook_from_nowhere_says_what_to_do(bare: list[str]) -> None:
    with pytest.raises(RuntimeError, match="open the notebook from a clone of its repository"):
        install("plots", "")
    assert bare == []


def test_nothing_is_installed_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    install("plots", ADDRESS)


def test_only_published_notebooks_name_a_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for chapter in export.chapters():
        more = {"export": ",ctranslate2,huggingface,onnx", "torchtext": ",torchtext"}
        call = json.dumps(f'install("{colab.EXTRAS}{more.get(chapter.stem, "")}", repository="")')
        assert call in chapter.with_suffix(".ipynb").read_text("utf-8"), chapter
    monkeypatch.delenv("BOOK_REPOSITORY_URL", raising=False)
    assert export.main(["--publish", str(tmp_path)]) == 2
    assert "BOOK_REPOSITORY_URL" in capsys.readouterr().err


def test_cell_of_a_synchronized_chapter_is_not_doubled() -> None:
    head = nbformat.v4.new_markdown_cell("# A chapter")
    old = nbformat.v4.new_code_cell("install()", metadata={"tags": [colab.TAG]})
    code = nbformat.v4.new_code_cell("x = 1")
    chapter = nbformat.v4.new_notebook(cells=[head, old, code])
    cells = nbformat.reads(export.paired(chapter), as_version=4).cells
    assert [cell.source for cell in cells] == ["# A chapter", colab.cell(), "x = 1"]
