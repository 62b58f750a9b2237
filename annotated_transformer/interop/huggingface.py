"""Export to Hugging Face's transformers; ``interop.marian`` reads such checkpoints.

Post-norm models become a ``MarianMTModel``, pre-norm models a ``PegasusForConditionalGeneration``.
Both compute what ours do. Marian does not store its positions: it has all sines first, then all
cosines. So the features of the residual stream are put into that order wherever they occur, which
changes no result.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from annotated_transformer.engine.system import System
from annotated_transformer.interop import folders
from annotated_transformer.interop.folders import ExportError
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.notation import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from annotated_transformer.translation.tokenizers import BPETokenizer

TARGET = "huggingface"
USE = """
# pip install torch transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSeq2SeqLM.from_pretrained(".")
batch = tokenizer(["…"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))
"""
LOST = (
    "Beam search divides the log-probability by length^α, and not by ((5 + length) / 6)^α as the "
    "paper does, and no output is limited to 50 tokens more than its source; other greedy outputs "
    "are the same. The last token of the longest output allowed is always the end symbol."
)


def export_huggingface(
    system: System, out: Path, *, record: Mapping[str, Any] | None = None
) -> None:
    """Write a system as ``transformers`` reads it: safetensors, configuration, tokenizer, card.

    Args:
        system: A Transformer with sub-words.
        out: The folder; see :func:`annotated_transformer.interop.folders.whole_folder`.
        record: The record of the run, for the card.

    Raises:
        ExportError: Neither class can express the model, or its tokenizer.
        FileError: The folder cannot be written, or holds something else.
    """
    config = folders.transformer_config(system, TARGET)
    folders.check_heads(config, TARGET)
    remedy = "use --to ctranslate2 or --to onnx"
    if not folders.has_sub_words(system):
        raise ExportError(f"--to {TARGET}: has no tokenizer that splits words as ours; {remedy}")
    if config.norm == "post" and config.positions == "learned":
        raise ExportError(f"--to {TARGET}: MarianMTModel has no learned positions; {remedy}")
    if config.norm == "pre" and config.tie != "all":
        raise ExportError(
            f"--to {TARGET}: PegasusForConditionalGeneration shares one matrix between both "
            f"embeddings and the generator, but this model has tie={config.tie}; {remedy}"
        )
    from transformers import PreTrainedTokenizerFast

    tokenizer = cast(BPETokenizer, system.tokenizers[0])
    with folders.whole_folder(out, to=TARGET, precision="float32") as folder:
        with hide_progress_bars():
            their_model(system.model, config, len(tokenizer)).save_pretrained(folder)
        names = zip(("pad", "bos", "eos", "unk"), SPECIAL_TOKENS, strict=True)
        PreTrainedTokenizerFast(
            tokenizer_object=folders.portable_tokenizer(tokenizer, ends=True),
            model_max_length=config.max_len,
            clean_up_tokenization_spaces=False,
            split_special_tokens=True,
            model_input_names=["input_ids", "attention_mask"],
            **{f"{name}_token": token for name, token in names},
        ).save_pretrained(folder)
        path = folder / "tokenizer_config.json"  # with the class's name in transformers 4 and 5
        path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
        card = folders.model_card(system, record, USE, LOST)
        (folder / "README.md").write_text(card, encoding="utf-8")
        shutil.copymode(folder / "README.md", folder / "model.safetensors")  # else for us alone


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Let ``transformers`` draw no progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def their_model(model: EncoderDecoder, config: ModelConfig, vocab: int) -> Any:
    """Return the model of ``transformers`` that computes what ours does."""
    import transformers

    c, post = config, config.norm == "post"
    kind: Any = transformers.MarianConfig if post else transformers.PegasusConfig
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    start = {"decoder_start_token_id": BOS, "forced_eos_token_id": EOS}
    sides = ("encoder", "decoder")
    theirs: Any = (
        transformers.MarianMTModel if post else transformers.PegasusForConditionalGeneration
    )(
        kind(
            **special, **start, **{f"{side}_layers": c.N for side in sides},
            **{f"{side}_ffn_dim": c.d_ff for side in sides},
            **{f"{side}_attention_heads": c.h for side in sides},
            vocab_size=vocab, d_model=c.d_model, max_position_embeddings=c.max_len,
            dropout=c.dropout, attention_dropout=c.attention_dropout,
            activation_dropout=c.ff_dropout, activation_function="relu", scale_embedding=True,
            tie_word_embeddings=c.tie != "none", unk_token_id=UNK,
            **({"share_encoder_decoder_embeddings": c.tie == "all"} if post else {}),
        )
    )  # fmt: skip
    theirs.generation_config = transformers.GenerationConfig(
        **special, **start, max_length=c.max_len, num_beams=1, do_sample=False
    )
    own = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    wanted = theirs.state_dict()
    order = sines_first(c.d_model) if post else torch.arange(c.d_model)
    found = {n: reorder_features(ours, own[ours], order) for n, ours in their_names(c).items()}
    found["model.shared.weight"] = found["model.encoder.embed_tokens.weight"]
    found["final_logits_bias"] = found["final_logits_bias"].unsqueeze(0)
    for side, embed in zip(sides, (model.src_embed, model.tgt_embed), strict=True):
        place = f"model.{side}.embed_positions.weight"
        found[place] = wanted[place] if post else cast(Any, embed)[1].pe[0].detach()
    theirs.load_state_dict({name: found[name] for name in wanted})
    return theirs.eval()


def their_names(config: ModelConfig) -> dict[str, str]:
    """Return the name of our parameter for each of theirs, positions and ``shared`` left out."""
    names = {
        "model.encoder.embed_tokens.weight": "src_embed.0.lut.weight",
        "model.decoder.embed_tokens.weight": "tgt_embed.0.lut.weight",
        "lm_head.weight": "generator.proj.weight",
        "final_logits_bias": "generator.proj.bias",
    }
    for (theirs, ours), end in ((pair, e) for pair in _modules(config) for e in ("weight", "bias")):
        names[f"model.{theirs}.{end}"] = f"{ours}.{end}"
    return names


def _modules(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the names of their and our linear maps and norms."""
    attentions = {"encoder": ("self_attn",), "decoder": ("self_attn", "encoder_attn")}
    for side, kinds in attentions.items():
        if config.norm == "pre":
            yield f"{side}.layer_norm", f"{side}.norm"
        for i in range(config.N):
            layer = f"{side}.layers.{i}"
            for n, kind in enumerate(kinds):
                own = "self_attn" if kind == "self_attn" else "src_attn"
                for j, part in enumerate(("q_proj", "k_proj", "v_proj", "out_proj")):
                    yield f"{layer}.{kind}.{part}", f"{layer}.{own}.linears.{j}"
                yield f"{layer}.{kind}_layer_norm", f"{layer}.sublayer.{n}.norm"
            yield f"{layer}.fc1", f"{layer}.feed_forward.w_1"
            yield f"{layer}.fc2", f"{layer}.feed_forward.w_2"
            yield f"{layer}.final_layer_norm", f"{layer}.sublayer.{len(kinds)}.norm"


def sines_first(d_model: int) -> Tensor:
    """Return where Marian's features are in ours: even ones (sines), then odd ones (cosines)."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


def reorder_features(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """Put the features of the residual stream of one of our parameters into another order.

    Args:
        name: Our name of it, which tells whether it reads the stream, or writes to it.
        tensor: Its value.
        order: Which feature comes first, second, …: ``(d_model,)``.
    """
    if any(part in name for part in (".linears.3.", ".w_2.", ".norm.")):
        return tensor[order]
    return tensor[:, order] if tensor.dim() == 2 else tensor
