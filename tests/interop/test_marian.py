"""Marian checkpoints of Hugging Face's layout give here what they give there."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from annotated_transformer.data.files import FileError
from annotated_transformer.engine.checkpoints import CheckpointError
from annotated_transformer.fast.loss import fast_batch_loss
from annotated_transformer.fast.search import greedy_search
from annotated_transformer.interop.marian import load_marian
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.loop import batch_loss
from tests.interop import small as ours
from tests.pipes import pipe_at

transformers.logging.disable_progress_bar()

MARIAN = {
    "shared": {"activation_function": "swish"},
    "two vocabularies": {
        "activation_function": "relu",
        "decoder_vocab_size": 35,
        "share_encoder_decoder_embeddings": False,
    },
    "all apart": {
        "activation_function": "gelu",
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
    },
}


def marian(folder: Path, **options: Any) -> Any:
    """Save a small random Marian, numbered as the released ones are; return it."""
    torch.manual_seed(2)
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder")
             for name, n in (("layers", 2), ("ffn_dim", 24), ("attention_heads", 2))}  # fmt: skip
    special = {"pad_token_id": 30, "decoder_start_token_id": 30, "eos_token_id": 0}
    config = transformers.MarianConfig(
        vocab_size=31, d_model=12, max_position_embeddings=40, scale_embedding=True,
        forced_eos_token_id=None, init_std=0.5, **sizes, **special, **options,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("options", MARIAN.values(), ids=MARIAN)
def test_a_marian_checkpoint_gives_its_outputs_here(
    options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = marian(tmp_path, **options)
    model, special = load_marian(tmp_path)
    assert special == (30, 30, 0)
    source = [[5, 6, 7, 8], [9, 3]]
    src = torch.tensor([[5, 6, 7, 8, 0], [9, 3, 0, 30, 30]])
    tgt = torch.tensor([[30, 1, 2], [30, 4, 5]])
    seen = (src != 30).unsqueeze(1)
    with torch.no_grad():
        wanted = theirs(src, attention_mask=seen[:, 0].long(), decoder_input_ids=tgt).logits
        causal = torch.ones(1, 3, 3, dtype=torch.bool).tril()
        found = model.generator.get_submodule("proj")(model(src, tgt, seen, causal))
    assert (found - wanted).abs().max() < ours.TOLERANCE
    pairs = make_batch(source, [[1, 2], [4]], special=special)  # the begin symbol is no padding
    labels = pairs.tgt_y.masked_fill(pairs.tgt_y == 30, -100)
    with torch.no_grad():
        loss = theirs(src, attention_mask=seen[:, 0].long(), labels=labels).loss
        for loss_of in (batch_loss, fast_batch_loss):
            assert (loss_of(model, pairs)[0] - loss).abs() < ours.TOLERANCE
    ids = greedy_search(model, source, 9, special=special)
    batch = {"input_ids": src, "attention_mask": seen[:, 0].long()}
    generated = theirs.generate(**batch, max_new_tokens=9, num_beams=1, do_sample=False)
    rows = [row[1:] for row in generated.tolist()]
    rows = [row[: row.index(0)] if 0 in row else row for row in rows]
    assert [[n for n in row if n != 30] for row in rows] == ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "pegasus"}, "model_type is 'pegasus'"),
        ({"scale_embedding": False}, "scale_embedding is False"),
        ({"decoder_layers": 1}, "decoder_layers is 1"),
        ({"activation_function": "mish"}, "no activation 'mish'"),
        ({"d_model": 13}, "damaged"),
        ({"d_model": 24}, "does not match the model"),
        ({"vocab_size": "x"}, "damaged"),
        ({"eos_token_id": None}, "damaged"),
    ],
)
def test_what_ours_cannot_be_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    marian(tmp_path, activation_function="relu")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match=message):
        load_marian(tmp_path)


def test_a_run_of_our_own_is_no_marian_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": 2}')
    with pytest.raises(FileError, match="give the folder of a Marian checkpoint"):
        load_marian(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("data", [None, b"", b"[1]"])
def test_a_damaged_checkpoint_is_one_line(name: str, data: bytes | None, tmp_path: Path) -> None:
    marian(tmp_path, activation_function="relu")
    (tmp_path / name).unlink() if data is None else (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        load_marian(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_one_line(name: str, tmp_path: Path) -> None:
    marian(tmp_path, activation_function="relu")
    message = rf"{re.escape(name)}: cannot be read: not a regular file"
    with pipe_at(tmp_path / name), pytest.raises(CheckpointError, match=message):
        load_marian(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 10**9}, {"vocab_size": 10**30}, {"vocab_size": -1}, {"d_model": 10**6},
        {"d_model": "12"}, {"d_model": 10**30}, {"max_position_embeddings": 10**9}, {"d_model": 0},
        {"encoder_layers": 10**6, "decoder_layers": 10**6}, {"pad_token_id": "x"},
        {"encoder_ffn_dim": 10**7, "decoder_ffn_dim": 10**7}, {"activation_function": ["relu"]},
    ],
)  # fmt: skip
def test_sizes_that_no_file_has_are_refused_before_memory_is_taken(
    change: dict[str, Any], tmp_path: Path
) -> None:
    marian(tmp_path, activation_function="relu")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match=r"config\.json") as caught:
        load_marian(tmp_path)
    assert "\n" not in str(caught.value)
