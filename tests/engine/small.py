"""Options and texts of small runs, and what they leave."""

from pathlib import Path

from annotated_transformer.data.corpora import load_corpus
from annotated_transformer.engine.checkpointer import checkpoint_paths
from annotated_transformer.engine.checkpoints import load_tensors
from annotated_transformer.engine.config import Options

TEXTS = (load_corpus("grammar", size=60), load_corpus("grammar", split="val", size=12))
OPTIONS = Options().replace(
    layers=1, d_model=32, d_ff=64, vocabulary=300, updates=8, warmup=4, max_tokens=256,
    dropout=0.2, max_len=128,
)  # fmt: skip


def bits_of(folder: Path) -> dict[str, bytes]:
    """Return the tensors of the newest checkpoint, the random state too, as bytes."""
    tensors, _ = load_tensors(checkpoint_paths(folder)[-1])
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
