"""Exercises with feedback: ``check("attention", yours)`` shows examples and names mistakes."""

from __future__ import annotations

import importlib
from typing import Any, Final

from annotated_transformer.exercises.declare import Exercise
from annotated_transformer.exercises.machinery import Result, run_check, show_report

__all__ = ["GROUPS", "NAMES", "Exercise", "Result", "check", "find"]

# Where each exercise is declared, under its name in capitals; a module is imported when one of its
# exercises is checked.
MODULES: Final = {
    "layers": "layer_norm residual feed_forward sinusoid scaled_embedding",
    "attending": "attention window_mask subsequent_mask padding_mask split_heads join_heads "
    "multi_head_attention narrow_heads head_map encoder_decoder neighbourhood_mask "
    "attention_products",
    "learning": "shift_target token_batches token_loss average_gradients",
    "updates": "learning_rate adam_step label_smoothing dropout average_checkpoints average_last",
    "words": "bpe_merge bpe_best_pair bpe_encode ngram_precision bleu",
    "decoding": "greedy_decode length_penalty beam_step beam_search",
    "using": "nucleus next_batch quantize_rows",
    "trees": "linearize",
    "background": "lstm_step gru_step additive_attention causal_convolution paired_interval",
    "counting": "layers_to_reach one_query training_cost model_parameters",
    "machine": "cached_attention roofline to_bfloat16 utilization run_hours",
    "text": "parallel_lines clean_pairs vocabulary resume_point suggestion",
}
#: The exercises, each with the module that declares it.
NAMES: Final = {name: module for module, names in MODULES.items() for name in names.split()}
#: Several exercises under one name, in this order.
GROUPS: Final = {
    "masks": ("subsequent_mask", "padding_mask"),
    "heads": ("split_heads", "join_heads"),
}


def find(name: str) -> Exercise:
    """Return an exercise by its name.

    Raises:
        ValueError: There is no such exercise.
    """
    if name not in NAMES:
        known = ", ".join(sorted([*NAMES, *GROUPS]))
        raise ValueError(f"there is no exercise {name!r}; choose among {known}")
    module = importlib.import_module(f"{__name__}.{NAMES[name]}")
    exercise: Exercise = getattr(module, name.upper())
    return exercise


def check(name: str, *yours: Any) -> Result:
    """Check a reader's answer: show three examples, try random cases, name the mistake.

    A wrong answer does not raise, so that the notebook continues; see ``Result.passed``.

    Args:
        name: Name of an exercise, such as ``"attention"``, from ``NAMES`` or ``GROUPS``.
        yours: The function, or the class of a layer; for a group, one for each part.

    Raises:
        ValueError: There is no such exercise, or the number of answers is wrong.
    """
    parts = GROUPS.get(name, (name,))
    exercises = [find(part) for part in parts]
    if len(parts) != len(yours):
        raise ValueError(f"{name} needs {len(parts)}: {', '.join(parts)}; {len(yours)} were given")
    results = []
    for part, exercise, answer in zip(parts, exercises, yours, strict=True):
        result, trial = run_check(part, exercise, answer)
        show_report(exercise, result, trial)
        results.append(result)
    return next((result for result in results if not result.passed), results[-1])
