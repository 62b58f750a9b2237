"""Several models that decode together: at each step, the mean of their probabilities."""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from annotated_transformer.fast.decoding import start_steps
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.translation.greedy import Steps


class EnsembleSteps(Steps):
    """Steps of several models for the same sentences and beam: the mean of their probabilities."""

    def __init__(self, parts: Sequence[Steps]) -> None:
        self.parts = parts

    def __call__(self, tokens: Tensor) -> Tensor:
        """Take the newest tokens ``(rows,)``; return log-probabilities ``(rows, vocab)``."""
        return mean_probability([part(tokens).log_softmax(-1) for part in self.parts])

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        for part in self.parts:
            part.select(sentences)

    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``."""
        for part in self.parts:
            part.follow(parents)


def mean_probability(log_probs: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the mean of probabilities, given the logarithm of each."""
    return torch.stack(list(log_probs)).logsumexp(0) - math.log(len(log_probs))


class Ensemble(EncoderDecoder):
    """Models of one vocabulary that every search takes for a single one.

    It has no encoder or decoder of its own, so it can only decode (``start_steps``) and score.

    Args:
        models: Models of any architecture, in evaluation mode.
    """

    def __init__(self, models: Sequence[EncoderDecoder]) -> None:
        nn.Module.__init__(self)
        self.models = nn.ModuleList(models)

    @property
    def members(self) -> list[EncoderDecoder]:
        """The models."""
        return [cast(EncoderDecoder, model) for model in self.models]

    def start_steps(self, src: Tensor, src_mask: Tensor, beam: int = 1) -> EnsembleSteps:
        """Encode ``src (sentences, m)`` with each model; return what decodes with all."""
        return EnsembleSteps([start_steps(model, src, src_mask, beam) for model in self.members])
