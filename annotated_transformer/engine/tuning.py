"""Fine-tuning: where a run starts from the weights of another one."""

from dataclasses import fields
from pathlib import Path

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.tensors import state_digest
from annotated_transformer.engine.checkpoints import best_weights, load_system, weights_of
from annotated_transformer.engine.config import ModelOptions, Options, UsageError, option_flag
from annotated_transformer.engine.system import System, architecture_name, model_config

FREE = ("dropout", "attention_dropout", "ff_dropout")  # no weight depends on these


def load_start(options: Options, text: ParallelText | Prepared) -> System:
    """Load what a new run fine-tunes; ``training["finetuned"]`` gets the digest of its weights.

    Raises:
        UsageError: The options or the text contradict its sizes, languages or tokenizer.
        CheckpointError: A file of it is missing or damaged.
    """
    folder = Path(str(options.optim.finetune_from))
    place = f"--finetune-from {folder}"
    weights = best_weights(folder)
    system = load_system(folder, weights=weights)
    if text.languages != system.languages:
        pair, other = ("-".join(each) for each in (text.languages, system.languages))
        raise UsageError(f"--pair {pair}: {folder} was trained for {other}; give that")
    if isinstance(text, Prepared) and text.tokenizer.to_json() != system.tokenizers[0].to_json():
        raise UsageError(
            f"{place}: has another tokenizer than {text.folder}; give the files with --train-files"
        )
    check_start_sizes(system, options, place)
    found = state_digest(weights_of(system.model), "")
    system.training["finetuned"] = {"weights": weights, "sha256": found}
    return system


def check_start_sizes(system: System, options: Options, place: str) -> None:
    """Raise UsageError if the options ask for other sizes than the system has."""
    wanted = model_config(options, system.shared)
    if (own_name := architecture_name(system.config)) != architecture_name(wanted):
        raise UsageError(
            f"--architecture {options.model.architecture}: {place} is {own_name}; leave it out"
        )
    names = {each.metadata.get("config"): each.name for each in fields(ModelOptions)}
    free = FREE if getattr(system.config, "positions", "") == "learned" else (*FREE, "max_len")
    for name, own in vars(system.config).items():
        if name not in free and (given := getattr(wanted, name)) != own:
            option = option_flag(names.get({"layers": "N"}.get(name, name)) or name)
            raise UsageError(f"{option} {given}: {place} has {own}; leave it out")
