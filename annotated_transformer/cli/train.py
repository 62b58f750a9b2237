"""``train`` trains a system on a corpus, or resumes a run."""

import contextlib
import shlex
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from annotated_transformer.cli.options import Search, Train
from annotated_transformer.cli.output import (
    NAME,
    check_target,
    command_line,
    log,
    print_error,
    show_scores,
    show_tree_scores,
)
from annotated_transformer.cli.systems import TEST, beam_and_alpha, load_split, test_split
from annotated_transformer.data.cleaning import corpus_warnings
from annotated_transformer.data.corpora import ParallelText, language_codes, read_parallel
from annotated_transformer.data.files import CorpusError, write_json
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.engine.checkpoints import AVERAGED, WEIGHTS, best_weights, load_system
from annotated_transformer.engine.config import (
    BUILT_IN,
    DataOptions,
    Options,
    UsageError,
    default_options,
    option_flag,
)
from annotated_transformer.engine.devices import describe_rate
from annotated_transformer.engine.parser import EXTRA, check_lengths, score_parser
from annotated_transformer.engine.processes import process_group
from annotated_transformer.engine.records import make_record
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.engine.texts import Texts
from annotated_transformer.engine.trainer import Trainer, check_world
from annotated_transformer.engine.treebanks import check_trees, is_parser
from annotated_transformer.engine.validator import fitting_pairs
from annotated_transformer.fast.products import Products, prepare_cpu
from annotated_transformer.model.transformer import count_parameters
from annotated_transformer.translation.evaluation import score


def run(command: Train) -> int:
    """Train, score and write the record, in several processes under torchrun."""
    options, bar, data = command.options, not command.quiet, command.data
    check_target("--record", command.record, *(data.train_files or ()), *(data.valid_files or ()))
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(process_group())
        check_world(options, world)
        texts = world.main_first(lambda: load_texts(options.data, bar, warn=world.main))
        if isinstance(texts, Prepared):
            options = prepared_options(options, texts, command.recipe)
        folder = command.out or default_folder(options)
        start = options.optim.finetune_from
        if start is not None and folder.resolve() == start.resolve():
            raise UsageError(f"--out {folder}: is also --finetune-from; choose another folder")
        products = prepare_cpu()
        trainer = Trainer(options, folder, texts, world)
        if is_parser(trainer.system.languages):
            world.main_first(lambda: check_trees_fit(trainer.system, options.data, texts))
        if world.main:
            log_plan(trainer, texts, products)
        finished = trainer.train(progress=bar)
    stopped = trainer.stopped
    if not world.main:
        return 0 if stopped is None else 128 + stopped
    log(throughput_summary(trainer))
    if not finished:
        how = "stopped" if stopped is None else "interrupted"
        done = trainer.state.updates
        print_error(f"{how} after update {done}; run the same command to resume")
        return 0 if stopped is None else 128 + stopped
    if trainer.state.out_of_patience(trainer.options.optim.patience):
        log(stopped_early(trainer))
    scores = score_run(trainer, texts, bar)
    path = command.record or folder / "record.json"
    counts = {"pairs": len(trainer.pairs), "processes": world.size}
    record = make_record(trainer.system, trainer.state, scores, command_line(), **counts)
    write_json(path, {**record, "weights": best_weights(folder)})  # those that translate uses
    trees = is_parser(trainer.system.languages)
    for name, found in scores.items():
        title = f"{options.data.corpus} {name}"
        if trees:
            show_tree_scores(found, title)
        else:
            show_scores(found, f"{title}, greedy")
    log(f"the system is in {folder}, the record of its run in {path}")
    log(f"next: {NAME} {'parse' if trees else 'translate'} {shlex.quote(str(folder))} FILE")
    return 0


def default_folder(options: Options) -> Path:
    """Return the default of ``--out``, the folder for checkpoints."""
    model = options.model
    kind = model.preset if model.architecture == "transformer" else model.architecture
    tuned = "" if options.optim.finetune_from is None else "-finetuned"
    return Path("runs") / f"{options.data.corpus}-{options.data.pair}-{kind}{tuned}"


def load_texts(data: DataOptions, bar: bool, *, warn: bool = True) -> Texts:
    """Load training and validation text, and warn about problems in them."""
    if data.prepared is not None:
        return Prepared(data.prepared)
    if data.corpus == "files":
        assert data.train_files is not None
        assert data.valid_files is not None
        pair = language_codes(data.pair)
        train = read_parallel(*data.train_files, languages=pair)
        valid = read_parallel(*data.valid_files, languages=pair, split="val")
        if is_parser(pair):
            train, valid = check_trees(train), check_trees(valid)
    else:
        load = partial(load_split, data.corpus, data.pair, mirror=data.mirror, bar=bar)
        train, valid = load("train", size=data.size), load("val")
    if warn and data.corpus not in BUILT_IN:  # its short sentences recur by chance
        for warning in corpus_warnings(train, {"val": valid}):
            log(warning)
    train = train if data.size is None else train.head(data.size)
    return train, valid


def prepared_options(options: Options, corpus: Prepared, recipe: str | None = None) -> Options:
    """Return the options with those that were fixed when the corpus was prepared.

    Raises:
        UsageError: The user has given other values.
    """
    data = options.data
    if data.size is not None:
        raise UsageError("--size: not for a prepared corpus; prepare a smaller one")
    pair = "-".join(corpus.languages)
    said = {"recipe": recipe, "corpus": "prepared", "pair": pair, "preset": options.model.preset}
    usual = default_options(said).data
    names = ("pair", "tokenizer", "vocabulary", "max_len")
    decided = {name: getattr(corpus.options, name) for name in names}
    for name, value in decided.items():
        if (given := getattr(data, name)) not in (value, getattr(usual, name)):
            raise UsageError(
                f"{option_flag(name)} {given}: {corpus.folder} was prepared with {value}"
            )
    return options.replace(**decided)


def log_plan(trainer: Trainer, texts: Texts, products: Products) -> None:
    """Log what is about to be trained."""
    for text in () if isinstance(texts, Prepared) else texts:
        if report := text.report():
            log(f"{text.name} {text.split}: {report}")
    if trainer.updater.precision.device.type == "cpu":
        log(str(products))
    if trainer.world.size > 1:
        log(f"{trainer.world.size} processes")
    if (start := trainer.options.optim.finetune_from) is not None:
        system, optim = trainer.system, trainer.options.optim
        weights = start / system.training["finetuned"]["weights"]
        log(
            f"kept from {weights}: {count_parameters(system.model):,} weights, the tokenizer of "
            f"{len(system.tokenizers[1]):,} entries, all sizes"
        )
        rate = "the paper's peak" if optim.peak is None else f"peak {optim.peak:g}"
        log(f"new: optimizer state, data, learning-rate schedule ({rate}, warm-up {optim.warmup})")
    log(f"{len(trainer.pairs)} sentence pairs, checkpoints in {trainer.folder}")


def throughput_summary(trainer: Trainer) -> str:
    """Return a run's speed, its total time at this speed, and its validation loss."""
    state, updates = trainer.state, trainer.options.optim.updates
    seconds = max(state.update_seconds, 1e-9)
    each = seconds / max(1, state.updates)
    rate = f", {describe_rate(state.flops / seconds, trainer.updater.peak)}" if state.flops else ""
    loss = "" if state.best is None else f"; validation loss {state.best:.4f}"
    return (
        f"{state.updates} updates of {each:.2f} seconds, {state.tokens / seconds:.0f} target "
        f"tokens per second{rate}; {updates} take {timedelta(seconds=round(each * updates))}{loss}"
    )


def stopped_early(trainer: Trainer) -> str:
    """Return why a run stopped before its last update."""
    state, optim = trainer.state, trainer.options.optim
    best = state.curve[-1 - state.stale] if state.stale < len(state.curve) else state.curve[0]
    by_bleu, plural = optim.best_metric == "bleu", "s" * (state.stale != 1)
    value, metric = (best.valid_bleu, "BLEU") if by_bleu else (best.valid_loss, "loss")
    return (
        f"stopped after update {state.updates}: {state.stale} validation{plural} without a better "
        f"{metric} than {value} at update {best.update} (--patience {optim.patience})"
    )


def test_text(data: DataOptions, texts: Texts, bar: bool) -> ParallelText:
    """Return the test set of a run."""
    if isinstance(texts, Prepared):
        return texts.text(test_split(texts))
    if data.corpus not in TEST:
        return texts[1]
    return load_split(data.corpus, data.pair, TEST[data.corpus], mirror=data.mirror, bar=bar)


def check_trees_fit(parser: System, data: DataOptions, texts: Texts) -> None:
    """Raise CorpusError for a test sentence that is too long, before hours of training."""
    test = test_text(data, texts, bar=False)
    sentences = [line.split() for line in test.source]
    check_lengths(parser, sentences, f"{test.name} {test.split}", EXTRA)


def fitting(system: System, test: ParallelText) -> ParallelText:
    """Return the sentences of a test text that the model can take; log how many it cannot.

    Raises:
        CorpusError: It can take none.
    """
    limit, kept = system.config.max_len, fitting_pairs(system, test)
    long = len(test) - len(kept)
    told = f"{test.name} {test.split}: {long} of {len(test)} sentences are too long"
    if not kept:
        raise CorpusError(f"{told}; raise --max-len {limit}")
    if long:
        log(f"{told} for --max-len {limit}, and are not scored")
    source, target = zip(*kept, strict=True)
    return replace(test, source=source, target=target)


def score_run(trainer: Trainer, texts: Texts, bar: bool) -> dict[str, Any]:
    """Score the best weights, and the averaged ones if they were requested.

    A parser takes minutes for the paper's search, so of its weights only the better ones are
    scored, freely and by constraint.
    """
    test, scores = test_text(trainer.options.data, texts, bar), {}
    if is_parser(trainer.system.languages):
        system = load_system(trainer.folder)
        system.model.to(trainer.updater.precision.device)
        beam, alpha = beam_and_alpha(Search(), system)
        return {test.split: score_parser(system, test, beam=beam, alpha=alpha, progress=bar)}
    test = fitting(trainer.system, test)
    weights = {test.split: WEIGHTS}
    if trainer.options.optim.average:
        weights[f"{test.split}, averaged"] = AVERAGED
    for name, file in weights.items():
        system = load_system(trainer.folder, weights=file)
        system.model.to(trainer.updater.precision.device)
        label = f"{test.name} {test.split}"
        found = translate_lines(system, test.source, name=label, progress=bar)
        scores[name] = score(found, test.target, lowercase=system.lowercase)
    return scores
