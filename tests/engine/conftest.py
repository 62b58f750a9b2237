"""A small run that nobody interrupts, for the tests of the engine."""

import pytest

from annotated_transformer.engine.checkpoints import load_system
from annotated_transformer.engine.system import System
from annotated_transformer.engine.trainer import Trainer
from tests.engine.small import OPTIONS, TEXTS


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a run that nobody interrupted."""
    run = Trainer(OPTIONS, tmp_path_factory.mktemp("straight"), TEXTS)
    assert run.train(progress=False)
    return run


@pytest.fixture(scope="session")
def system(straight: Trainer) -> System:
    """Return what it learned."""
    return load_system(straight.folder)
