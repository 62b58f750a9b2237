"""Training steps of other libraries: Hugging Face, x-transformers, OpenNMT-py and fairseq.

``python -m benchmarks --install`` installs each library into a folder of its own. All use the
project's PyTorch, even where they ask for an older one. A contender is the library's own model,
loss and optimizer and, if it has one that takes a batch, its own training step, configured as in
its recipe for translation. ``python -m benchmarks.trainers NAME`` shows that a contender learns.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import subprocess
import sys
import tarfile
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.notation import PAD
from benchmarks import contenders, rivals
from benchmarks.contenders import Size, make_pairs

PACKAGES = {  # what the import needs beyond the project's own packages, and no second PyTorch
    "x_transformers": (
        *("x-transformers==2.31.10", "torch-einops-utils==0.2.0", "einops==0.8.2", "einx==0.4.3"),
        *("frozendict==2.5.1", "loguru==0.7.3", "packaging==26.3"),
    ),
    "opennmt": (
        *("OpenNMT-py==3.5.1", "pyonmttok==1.38.1", "configargparse==1.9.0", "pyyaml==6.0.3"),
        *("rapidfuzz==3.14.6", "pyahocorasick==2.3.1", "six==1.17.0"),
    ),
    "fairseq": (
        *("hydra-core==1.0.7", "omegaconf==2.0.6", "antlr4-python3-runtime==4.8"),
        *("pyyaml==6.0.3", "bitarray==3.12.3"),
    ),
}
FAIRSEQ = "fairseq==0.12.2"
FOLDER = rivals.FOLDER.parent / "trainers"
RATE = 1e-4
Trained = tuple[nn.Module, Callable[[], float]]  # a model, and a step that returns its loss


def install() -> None:
    """Install each library into its folder, without its own PyTorch."""
    pip = [sys.executable, "-m", "pip"]
    for name, packages in PACKAGES.items():
        options = ["--no-deps", "--upgrade", "--target", str(FOLDER / name)]
        subprocess.run([*pip, "install", *options, *packages], check=True)
    with tempfile.TemporaryDirectory() as folder:  # its compiled parts read data: not needed
        options = ["--no-deps", "--no-binary", "fairseq", "--dest", folder]
        subprocess.run([*pip, "download", *options, FAIRSEQ], check=True)
        with tarfile.open(next(Path(folder).glob("fairseq-*.tar.gz"))) as archive:
            for member in archive:
                below = member.name.partition("/")[2]
                if below.startswith("fairseq/") and ".." not in below and member.isfile():
                    (path := FOLDER / "fairseq" / below).parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(cast(IO[bytes], archive.extractfile(member)).read())


def use(folder: Path) -> None:
    """Make the packages in a folder importable, after the project's own."""
    if not folder.exists():
        raise SystemExit("the rivals are not installed: python -m benchmarks --install")
    sys.path.append(str(folder))
    warnings.filterwarnings("ignore", category=FutureWarning)  # old ways to call PyTorch
    logging.disable(logging.WARNING)


def sentences(tokens: Tensor) -> list[Tensor]:
    """Remove the padding."""
    return [row[row != PAD] for row in tokens]


def hugging_face(size: Size) -> Trained:
    """Marian, with the label smoother, AdamW and clipping that ``Seq2SeqTrainer`` defaults to."""
    use(rivals.FOLDER)
    from transformers.trainer_pt_utils import LabelSmoother

    c, batch = size.config, make_pairs(size)
    dropout = {
        "dropout": c.dropout,
        "attention_dropout": c.attention_dropout,
        "activation_dropout": c.ff_dropout,
    }
    words = {"vocab_size": size.vocabulary, "pad_token_id": PAD, "decoder_start_token_id": PAD}
    model: Any = rivals.marian(size, **dropout, **words).train()
    smoother = LabelSmoother(epsilon=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    labels = batch.tgt_y.masked_fill(batch.tgt_y == PAD, smoother.ignore_index)
    mask = (batch.src != PAD).long()

    def step() -> float:
        out = model(input_ids=batch.src, attention_mask=mask, decoder_input_ids=batch.tgt)
        loss = smoother(out, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        return float(loss.item())

    return model, step


def x_transformers(size: Size) -> Trained:
    """``XTransformer`` with its own loss, which smooths nothing, and PyTorch's Adam."""
    use(FOLDER / "x_transformers")
    from x_transformers import XTransformer

    c, batch = size.config, make_pairs(size)
    torch.manual_seed(0)
    side = {
        "num_tokens": size.vocabulary,
        "max_seq_len": c.max_len,
        "depth": c.N,
        "heads": c.h,
        "attn_dim_head": c.d_model // c.h,
        "ff_mult": c.d_ff / c.d_model,
        "ff_custom_activation": nn.ReLU(),
        "attn_dropout": c.dropout,
        "ff_dropout": c.dropout,
    }
    both = {f"{prefix}_{name}": value for prefix in ("enc", "dec") for name, value in side.items()}
    model: Any = XTransformer(dim=c.d_model, tie_token_emb=True, **both).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    mask = batch.src != PAD
    target = batch.target
    target = target.masked_fill(target == PAD, -100)

    def step() -> float:
        loss = model(batch.src, target, mask=mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return model, step


def opennmt(size: Size) -> Trained:
    """OpenNMT-py's model, loss, optimizer and training step, from the options of its recipe."""
    use(FOLDER / "opennmt")
    sys.modules["fasttext"] = types.ModuleType("fasttext")  # only tells languages apart
    import pyonmttok
    from onmt.constants import DefaultTokens
    from onmt.model_builder import build_model
    from onmt.opts import train_opts
    from onmt.trainer import build_trainer
    from onmt.utils import Statistics
    from onmt.utils.optimizers import Optimizer
    from onmt.utils.parse import ArgumentParser

    c, batch = size.config, make_pairs(size)
    torch.manual_seed(0)
    options = f"""
        --data none --src_vocab none --encoder_type transformer --decoder_type transformer
        --position_encoding --share_vocab --share_embeddings --share_decoder_embeddings
        --layers {c.N} --heads {c.h} --hidden_size {c.d_model} --word_vec_size {c.d_model}
        --transformer_ff {c.d_ff} --dropout {c.dropout} --attention_dropout {c.dropout}
        --label_smoothing 0.1 --param_init 0 --param_init_glorot --optim adam
        --adam_beta2 0.998 --learning_rate {RATE} --max_grad_norm 0 --normalization tokens
    """
    parser = ArgumentParser()
    train_opts(parser)
    opt = parser.parse_args(options.split())
    opt.data = {}
    ArgumentParser.update_model_opts(opt)
    special = DefaultTokens.UNK, DefaultTokens.PAD, DefaultTokens.BOS, DefaultTokens.EOS
    words = [f"w{i}" for i in range(4, size.vocabulary)]
    words = pyonmttok.build_vocab_from_tokens(words, special_tokens=list(special))
    vocabularies = {"src": words, "tgt": words, "data_task": "seq2seq"}
    model = build_model(opt, opt, vocabularies, None, -1).train()
    trainer = build_trainer(opt, -1, model, vocabularies, Optimizer.from_opt(model, opt))
    pad, target = words[DefaultTokens.PAD], batch.target
    pairs = {
        "src": batch.src.masked_fill(batch.src == PAD, pad).unsqueeze(-1),
        "srclen": (batch.src != PAD).sum(1),
        "tgt": target.masked_fill(target == PAD, pad).unsqueeze(-1),
    }

    def step() -> float:
        report = Statistics()
        trainer.accum_count = 1
        trainer._gradient_accumulation([pairs], int(batch.ntokens), Statistics(), report)
        return float(report.loss) / int(batch.ntokens)

    return model, step


def fairseq(size: Size) -> Trained:
    """The ``Trainer`` of fairseq, from the options of its recipe for WMT, on its own batch."""
    use(FOLDER / "fairseq")
    plain: Any = dataclasses.dataclass

    def hashable(cls: Any = None, **options: Any) -> Any:  # as Python 3.11 wants defaults to be
        return plain(cls, **{"unsafe_hash": True, **options})

    dataclasses.dataclass = hashable
    try:
        from fairseq import options
        from fairseq.data import Dictionary
        from fairseq.data.language_pair_dataset import collate
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf
        from fairseq.tasks.translation import TranslationTask
        from fairseq.trainer import Trainer
    finally:
        dataclasses.dataclass = plain
    c, batch = size.config, make_pairs(size)
    torch.manual_seed(0)
    sides = " ".join(
        f"--{side}-layers {c.N} --{side}-attention-heads {c.h} "
        f"--{side}-embed-dim {c.d_model} --{side}-ffn-embed-dim {c.d_ff}"
        for side in ("encoder", "decoder")
    )
    line = f"""none --arch transformer_wmt_en_de --share-all-embeddings {sides}
        --dropout {c.dropout} --attention-dropout {c.attention_dropout}
        --activation-dropout {c.ff_dropout} --optimizer adam --adam-betas (0.9,0.98) --lr {RATE}
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --cpu"""
    arguments = options.parse_args_and_arch(options.get_training_parser(), line.split())
    settings: Any = convert_namespace_to_omegaconf(arguments)
    words = Dictionary()
    for i in range(4, size.vocabulary):
        words.add_symbol(f"w{i}")
    task = TranslationTask(settings.task, words, words)
    model = task.build_model(settings.model)
    trainer = Trainer(settings, task, model, task.build_criterion(settings.criterion))
    pairs = enumerate(zip(sentences(batch.src), sentences(batch.tgt_y), strict=True))
    rows = [{"id": i, "source": source, "target": target} for i, (source, target) in pairs]
    sample = collate(rows, pad_idx=words.pad(), eos_idx=words.eos())

    def step() -> float:
        return float(trainer.train_step([sample])["loss"]) * math.log(2)  # told in bits

    return model, step


TRAINERS = {
    "hugging_face": hugging_face,
    "x_transformers": x_transformers,
    "opennmt": opennmt,
    "fairseq": fairseq,
}


def contender(name: str, size: Size) -> contenders.Step:
    """Return the training step of a library, or of one of the contenders without a library."""
    if name in contenders.CONTENDERS:
        return contenders.CONTENDERS[name](size, "train")
    return TRAINERS[name](size)[1]


TINY = Size(ModelConfig(N=1, d_model=64, d_ff=256, h=4, max_len=512), 500, 8)


def main() -> None:
    """Show that a library can learn a batch: print its first loss and its last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainers", description=main.__doc__)
    parser.add_argument("name", choices=TRAINERS)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    _, step = TRAINERS[options.name](TINY)
    losses = [step() for _ in range(options.steps)]
    print(f"loss {losses[0]:.2f}, after {options.steps} steps {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
