"""``compare`` scores two translations of one text."""

from annotated_transformer.cli.options import Compare
from annotated_transformer.cli.output import print_result
from annotated_transformer.data.corpora import read_parallel, read_side
from annotated_transformer.data.files import CorpusError
from annotated_transformer.translation.evaluation import paired_bootstrap


def run(command: Compare) -> int:
    """Print both scores, their difference, and its significance."""
    text = read_parallel(command.first, command.references, drop_blank=False)
    second, *_ = read_side(command.second)  # read each file once, because it may be a pipe
    if len(second) != len(text):
        raise CorpusError(
            f"{command.second} has {len(second)} line{'s' * (len(second) != 1)} and "
            f"{command.references} has {len(text)}; "
            "line n of one file must translate line n of the other"
        )
    found = paired_bootstrap(text.source, second, text.target, samples=command.samples)
    print_result(
        f"{command.first}: BLEU {found.first:.2f}\n{command.second}: BLEU {found.second:.2f}\n"
        f"difference {found.second - found.first:+.2f} (second minus first); 95 % of "
        f"{command.samples} bootstrap samples lie from {found.low:+.2f} to {found.high:+.2f}; "
        f"p = {found.p:.3f}"
    )
    return 0
