"""The model that comes with the package: its files, what it computes, how good it is."""

import copy
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.engine.system import translate_lines
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.multi_head import MultiHeadedAttention, split_heads
from annotated_transformer.pretrained import (
    FILES,
    FOLDER,
    RUNNING,
    SUMS,
    Pretrained,
    PretrainedError,
    dequantize,
    load_pretrained,
    trace_modules,
)
from annotated_transformer.translation.greedy import greedy_search
from benchmarks.pretrained import quantize

RECORD = json.loads(
    (Path(__file__).parents[2] / "results/pretrained/model.json").read_text(encoding="utf-8")
)
GERMAN = "Der Bäcker wirft meine neue Zeitung weg, weil sie nass ist."
ENGLISH = "The baker throws away my new newspaper because it is wet."


@pytest.fixture(scope="module")
def found() -> Pretrained:
    return load_pretrained()


def test_it_is_the_model_of_the_paper_and_small(found: Pretrained) -> None:
    assert isinstance(found.model, EncoderDecoder)
    assert not found.model.training
    assert (found.config.norm, found.config.tie) == ("post", "all")
    assert found.config.positions == "sinusoid"
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    assert (FOLDER / "model.safetensors").stat().st_size <= 1_100_000
    assert sum((FOLDER / name).stat().st_size for name in (*FILES, SUMS)) <= 3_000_000


def test_loading_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    one, other = load_pretrained(), load_pretrained()
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_running_sentence_is_translated_both_ways(found: Pretrained) -> None:
    assert (RUNNING.text("de"), RUNNING.text("en")) == (GERMAN, ENGLISH)
    assert found.translate(GERMAN) == ENGLISH
    assert found.translate(ENGLISH) == GERMAN


@pytest.mark.parametrize("direction", ["de-en", "en-de"])
def test_it_is_as_good_as_its_record_says(found: Pretrained, direction: str) -> None:
    """Sentences that nobody has seen: so few are right by chance once in ten thousand times."""
    source, target = direction.split("-")
    pairs = grammar_pairs("test", 100, seed=1)
    texts = [found.tokenizer.encode(pair.text(source)) for pair in pairs]
    lines = [found.tokenizer.decode(ids) for ids in greedy_search(found.model, texts)]
    right = sum(line == pair.text(target) for line, pair in zip(lines, pairs, strict=True))
    low = RECORD["scores"]["stored"][direction]["exact"]["interval"][0]
    assert right >= 100 * low - 4 * (100 * low * (1 - low)) ** 0.5


def test_the_record_is_that_of_these_files() -> None:
    for name in FILES:
        assert RECORD["sha256"][name] == hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
    for direction in ("de-en", "en-de"):
        before, after = (RECORD["scores"][kind][direction] for kind in ("trained", "stored"))
        assert before["running"]
        assert after["running"]
        low, high = before["exact"]["interval"]
        assert low <= after["exact"]["share"] <= high  # 8 bits are enough
        assert after["bleu"] > 95


# --- storage ---------------------------------------------------------------------------------


def test_matrices_take_8_bits_and_a_scale_for_each_row() -> None:
    matrix = torch.tensor([[1.27, -0.5, 0.014], [0.0, 0.0, 0.0]])
    stored = quantize({"m": matrix, "v": torch.tensor([0.1, 0.2])})
    assert stored["m"].dtype == torch.int8
    assert stored["m"].tolist() == [[127, -50, 1], [0, 0, 0]]
    assert stored["m.scale"][0].item() == pytest.approx(0.01)
    again = dequantize(stored)
    assert set(again) == {"m", "v"}
    assert again["m"].tolist() == [pytest.approx([1.27, -0.5, 0.01]), [0, 0, 0]]
    assert torch.equal(again["v"], torch.tensor([0.1, 0.2]))


def test_what_is_stored_would_be_stored_so_again(found: Pretrained) -> None:
    stored = load_file(FOLDER / "model.safetensors")
    again = quantize(dict(found.model.named_parameters()))
    assert set(again) == set(stored)
    for name, tensor in stored.items():
        exact = tensor.dtype == torch.int8 or f"{name}.scale" not in stored
        tolerance = 0.0 if exact and not name.endswith(".scale") else 1e-6
        torch.testing.assert_close(again[name], tensor, rtol=tolerance, atol=0.0)
    assert all(stored[n].dtype == torch.int8 for n in stored if f"{n}.scale" in stored)


def flipped(path: Path) -> None:
    """Change a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Leave half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flipped, cut, Path.unlink])
@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_damage_is_one_line(name: str, damage: Callable[[Path], Any], tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    damage(tmp_path / "copy" / name)
    with pytest.raises(PretrainedError) as error:
        load_pretrained(tmp_path / "copy")
    assert str(tmp_path / "copy") in str(error.value)
    assert "reinstall annotated-transformer" in str(error.value)
    assert "\n" not in str(error.value)


def with_config(**changes: Any) -> Callable[[Path], Any]:
    """Return what changes the configuration of a copy."""

    def change(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**data, **changes}))

    return change


def other_tensors(folder: Path) -> None:
    """Leave one tensor out."""
    stored = load_file(folder / "model.safetensors")
    stored.pop("generator.proj.bias")
    save_file(stored, folder / "model.safetensors")


def other_tokenizer(folder: Path) -> None:
    """Put a tokenizer of words there."""
    text = '{"format": 1, "kind": "words", "language": "de", "entries": []}'
    (folder / "tokenizer.json").write_text(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_config(format=9), "format 9"),
        (with_config(model={"h": 3, "d_model": 128}), "not a multiple of h=3"),
        (with_config(model={"colour": 1}), "colour"),
        (with_config(model={"N": 1, "d_model": 128}), "do not match"),
        (other_tensors, "do not match"),
        (other_tokenizer, "no byte-pair encoding"),
        (lambda folder: (folder / "words.json").write_text("[1]"), "list"),
    ],
)
def test_files_that_do_not_fit_are_one_line(
    change: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    change(folder)
    digests = (hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES)
    sums = (f"{digest}  {name}\n" for digest, name in zip(digests, FILES, strict=True))
    (folder / SUMS).write_text("".join(sums))
    with pytest.raises(PretrainedError, match=reason) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


# --- what chapters use -----------------------------------------------------------------------


def test_trace_has_what_every_part_computes(found: Pretrained) -> None:
    model, batch = found.model, found.batch(GERMAN, ENGLISH)
    numbers = found.trace(GERMAN, ENGLISH)
    n, m = batch.tgt.size(1), batch.src.size(1)
    with torch.no_grad():
        out = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    assert torch.equal(numbers["generator"], model.generator(out))
    assert torch.equal(numbers["generator.proj"].log_softmax(-1), numbers["generator"])
    assert numbers["encoder.layers.0.sublayer.1"].shape == (1, m, 128)
    name = "decoder.layers.0.src_attn"
    assert isinstance(model.get_submodule(name), MultiHeadedAttention)
    q, k = (split_heads(numbers[f"{name}.linears.{i}"], 4) for i in (0, 1))
    weights = (q @ k.transpose(-2, -1) / 32**0.5).softmax(-1)
    assert weights.shape == (1, 4, n, m)
    torch.testing.assert_close(numbers[f"{name}.attn"], weights)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_trace_goes_where_the_model_is(found: Pretrained) -> None:
    model = copy.deepcopy(found.model).to("meta")  # as on a GPU: the batch must follow
    traced = trace_modules(model, found.batch(RUNNING.text("de"), RUNNING.text("en")))
    assert traced["generator.proj"].device.type == "meta"


def test_labels_are_the_tokens_that_are_read(found: Pretrained) -> None:
    batch = found.batch(GERMAN, ENGLISH)
    source, target = found.labels(GERMAN), found.labels(ENGLISH, target=True)
    assert (len(source), len(target)) == (batch.src.size(1), batch.tgt.size(1))
    assert (source[-1], target[0]) == ("</s>", "<s>")
    assert "".join(source[:-1]).replace("▁", " ").strip() == GERMAN


def test_words_that_nobody_has_taught_it(found: Pretrained) -> None:
    for pair in grammar_pairs("test", 50):
        assert found.unknown(pair.text("de")) == found.unknown(pair.text("en")) == []
    assert found.unknown("Attention is all you need.") == ["Attention", "all", "you"]
    assert found.unknown("der Computer schläft") == ["Computer"]
    assert found.unknown("") == []


def test_the_module_needs_pytorch_alone() -> None:
    names = ("tokenizers", "safetensors", "numpy", "spacy", "sacrebleu", "tqdm", "tyro")
    block = f"import sys; sys.modules.update(dict.fromkeys({names}))"
    program = f"{block}; import annotated_transformer.pretrained as p; print(p.RUNNING.text('en'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{ENGLISH}\n", done.stderr
    program = f"{block}; import annotated_transformer.pretrained as p; p.load_pretrained()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert "load_pretrained needs safetensors" in said
    assert 'with its extra "translation"' in said


def test_it_is_a_system(found: Pretrained) -> None:
    system = found.system
    assert translate_lines(system, [GERMAN]) == [ENGLISH]
    assert system.model is found.model
    assert system.shared
