"""What the extensions share that gather something from all pages and list it on some of them."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

T = TypeVar("T")


@dataclass(frozen=True)
class Gathered(Generic[T]):
    """What was found on each page, and the pages that list it all; both live in the environment."""

    name: str

    def by_page(self, env: BuildEnvironment) -> dict[str, list[T]]:
        """Return what was found, by page."""
        found: dict[str, list[T]] = vars(env).setdefault(f"{self.name}_by_page", {})
        return found

    def lists(self, env: BuildEnvironment) -> set[str]:
        """Return the pages that list it."""
        found: set[str] = vars(env).setdefault(f"{self.name}_lists", set())
        return found

    def connect(self, app: Sphinx) -> None:
        """Keep both in step with the pages, and write the lists anew whenever one was read."""
        app.connect("env-purge-doc", self.purge)
        app.connect("env-merge-info", self.merge)
        app.connect("env-updated", lambda _app, env: sorted(self.lists(env)))

    def purge(self, _app: Sphinx, env: BuildEnvironment, page: str) -> None:
        """Forget what was found on a page that is read again."""
        self.by_page(env).pop(page, None)
        self.lists(env).discard(page)

    def merge(
        self, _app: Sphinx, env: BuildEnvironment, pages: set[str], other: BuildEnvironment
    ) -> None:
        """Take what a parallel reader found."""
        mine, theirs = self.by_page(env), self.by_page(other)
        mine.update({page: theirs[page] for page in pages if page in theirs})
        self.lists(env).update(self.lists(other))
