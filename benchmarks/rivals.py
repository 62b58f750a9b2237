"""Decoders of other libraries, of the same size: Hugging Face's Marian and CTranslate2.

``python -m benchmarks --install`` installs them into a folder of their own. They use the
project's PyTorch, and nothing in the project depends on them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from annotated_transformer.fast.decoding import keep_decoder_weights
from annotated_transformer.fast.products import prepare_cpu
from annotated_transformer.fast.quantized import DecodingPrecision
from annotated_transformer.fast.search import beam_search, greedy_search
from annotated_transformer.model.transformer import build_model
from annotated_transformer.notation import EOS, UNK
from benchmarks.contenders import Size

PACKAGES = ("ctranslate2==4.8.5", "transformers==5.23.0")
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / (
    "annotated-transformer/rivals"
)
SOURCE, TARGET, ALPHA = 20, 60, 0.6
Step = Callable[[], object]


def install() -> None:
    """Install the other libraries into their folder."""
    pip = [sys.executable, "-m", "pip", "install", "--target", str(FOLDER), "--upgrade"]
    subprocess.run([*pip, *PACKAGES], check=True)


def sources(size: Size, count: int) -> list[list[int]]:
    """Draw sentences of equal length."""
    rng = torch.Generator().manual_seed(0)
    block = torch.randint(4, size.vocabulary, (count, SOURCE), generator=rng)
    found: list[list[int]] = block.tolist()
    return found


def ours(size: Size, count: int, beam: int, precision: DecodingPrecision = "float32") -> Step:
    """Our search, as the command line runs it, with the end symbol made impossible."""
    prepare_cpu()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    model = build_model(size.vocabulary, size.vocabulary, size.config).eval()
    model.generator.get_parameter("proj.bias").detach()[EOS] = -1e4
    texts, kept = sources(size, count), keep_decoder_weights(model, precision)
    kept.__enter__()

    def step(_: object = kept) -> object:  # keeps the context open
        if beam == 1:
            outputs = greedy_search(model, texts, TARGET)
        else:
            found = beam_search(model, texts, beam=beam, alpha=ALPHA, max_len=TARGET)
            outputs = [hypotheses[0].tokens for hypotheses in found]
        assert all(len(output) == TARGET for output in outputs)
        return outputs

    return step


def marian(size: Size, **settings: object) -> torch.nn.Module:
    """Build Hugging Face's Marian with initial weights, and with other settings if given."""
    if not FOLDER.exists():
        raise SystemExit("the rivals are not installed: python -m benchmarks --install")
    sys.path.append(str(FOLDER))  # after the project's own packages
    from transformers import MarianConfig, MarianMTModel

    c = size.config
    torch.manual_seed(0)
    usual = {
        "vocab_size": size.vocabulary + 1,  # the padding is last, and CTranslate2 leaves it out
        "d_model": c.d_model,
        "encoder_layers": c.N,
        "decoder_layers": c.N,
        "encoder_attention_heads": c.h,
        "decoder_attention_heads": c.h,
        "encoder_ffn_dim": c.d_ff,
        "decoder_ffn_dim": c.d_ff,
        "max_position_embeddings": c.max_len,
        "activation_function": "relu",
        "scale_embedding": True,
        "pad_token_id": size.vocabulary,
        "decoder_start_token_id": size.vocabulary,
        "eos_token_id": EOS,
        "forced_eos_token_id": None,
    }
    model: torch.nn.Module = MarianMTModel(MarianConfig(**{**usual, **settings})).eval()
    return model


def hugging_face(size: Size, count: int, beam: int) -> Step:
    """Marian's own ``generate``, with its KV cache."""
    model = marian(size)
    src = torch.tensor([[*source, EOS] for source in sources(size, count)])
    options = {"num_beams": beam, "do_sample": False, "length_penalty": ALPHA if beam > 1 else None}

    def step() -> object:
        with torch.inference_mode():
            out = model.generate(  # type: ignore[operator]
                src,
                attention_mask=torch.ones_like(src),
                min_new_tokens=TARGET,
                max_new_tokens=TARGET,
                **{name: value for name, value in options.items() if value is not None},
            )
        assert out.shape == (count, TARGET + 1)
        return out

    return step


def ctranslate2(
    size: Size, count: int, beam: int, precision: DecodingPrecision = "float32"
) -> Step:
    """CTranslate2, with the weights of that Marian."""
    model = marian(size)
    import ctranslate2 as library
    from ctranslate2.converters.transformers import MarianMTLoader

    words = [f"w{i}" for i in range(size.vocabulary)]
    words[EOS], words[UNK] = "</s>", "<unk>"
    spec = MarianMTLoader().get_model_spec(model)
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.eos_token, spec.config.unk_token = "</s>", "<unk>"
    spec.config.decoder_start_token = "</s>"  # any: it starts from a zero embedding
    with tempfile.TemporaryDirectory() as folder:
        spec.validate()
        spec.optimize(quantization=precision)
        spec.save(folder)
        translator = library.Translator(
            folder, compute_type=precision, inter_threads=1, intra_threads=torch.get_num_threads()
        )
    texts = [[*(words[token] for token in source), "</s>"] for source in sources(size, count)]

    def step() -> object:
        found = translator.translate_batch(
            texts,
            beam_size=beam,
            length_penalty=ALPHA,
            min_decoding_length=TARGET,
            max_decoding_length=TARGET,
        )
        assert all(len(one.hypotheses[0]) == TARGET for one in found)
        return found

    return step


CONTENDERS = {"ours": ours, "hugging_face": hugging_face, "ctranslate2": ctranslate2}
