"""Cases of the sweep: bad texts at every place, bad values of every option, contradictions."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from annotated_transformer.cli.options import COMMANDS
from tests.cli.sweep import PREPARE, TEXT, TRAIN, Case, Make, Place, nothing, put


def unreadable(place: Place) -> None:
    """Make a file that nobody may read."""
    (place.here / "bad").write_bytes(TEXT.encode())
    (place.here / "bad").chmod(0)


def loop(place: Place) -> None:
    """Make a link to itself."""
    (place.here / "bad").symlink_to("bad")


BAD_TEXTS: dict[str, tuple[str, Make]] = {  # its path, and what puts it there
    "missing": ("bad", nothing),
    "a folder": ("bad", lambda place: (place.here / "bad").mkdir()),
    "latin-1": ("bad", put(TEXT.encode("latin-1"))),
    "utf-16": ("bad", put(TEXT.encode("utf-16"))),
    "utf-16 without a mark": ("bad", put("The dog sleeps .\n".encode("utf-16-le") * 8)),
    "NUL bytes": ("bad", put(TEXT.encode() * 2 + b"a\0b\n" * 8)),
    "lone surrogates": ("bad", put(b"a\n\xed\xa0\x80\n" + b"b\n" * 6)),
    "random bytes": ("bad", put(random.Random(1).randbytes(5000))),
    "an HTML page": ("bad", put(b"\n<!DOCTYPE html><p>404\n")),
    "a link to itself": ("bad", loop),
    "a link to nothing": ("bad", lambda place: (place.here / "bad").symlink_to("none")),
    "unreadable": ("bad", unreadable),
    "a disk that fails": ("/proc/self/mem", nothing),
    "packed and cut short": ("bad", put(gzip.compress(TEXT.encode() * 99)[:40])),
    "packed by its name alone": ("bad.gz", put(TEXT.encode(), "bad.gz")),
    "a line of 10 MB": ("bad", put(b"a\n" + b"wort " * 2_000_000 + b"\n" + b"b\n" * 6)),
    "a line without an end": ("/dev/zero", nothing),
    "below a file": ("bad/text", put(b"")),
    "a name that is too long": ("x" * 300, nothing),
    "a name with a line end": ("a\nb", nothing),
    "an empty name": ("", nothing),
}
SHORT: dict[str, tuple[str, Make]] = {  # bad only where another file has more lines
    "empty": ("bad", put(b"")),
    "a line less": ("bad", put(TEXT.encode()[:-20])),
    "a line more": ("bad", put(TEXT.encode() + b"x\n")),
    "nothing to read": ("/dev/null", nothing),
}
BLANK: dict[str, tuple[str, Make]] = {"blank lines": ("bad", put(b"\n" * 8))}
PLACES = {  # where a text is read: the words, and which of them it is
    "train, source": (TRAIN, 2),
    "train, target": (TRAIN, 3),
    "train, validation source": (TRAIN, 5),
    "train, validation target": (TRAIN, 6),
    "translate": ("translate @run @text/is --beam 1 --quiet -o out", 2),
    "translate, without a folder": ("translate @text/is --beam 1 --quiet -o out", 1),
    "parse": ("parse @parser @text/is --beam 1 --quiet -o out", 2),
    "evaluate, hypotheses": ("evaluate --hypotheses @text/is --references @text/is", 2),
    "evaluate, references": ("evaluate --hypotheses @text/is --references @text/is", 4),
    "compare, first": ("compare @text/is @text/is --references @text/is", 1),
    "compare, second": ("compare @text/is @text/is --references @text/is", 2),
    "compare, references": ("compare @text/is @text/is --references @text/is", 4),
    "prepare, source": (PREPARE, 3),
    "prepare, target": (PREPARE, 4),
    "prepare, validation": (PREPARE, 7),
    "recipe": (f"{TRAIN} --recipe x", -1),
    "score, source": ("score @run @text/valid.de @text/valid.en --quiet -o out", 2),
    "score, target": ("score @run @text/valid.de @text/valid.en --quiet -o out", 3),
}
FOUND = {  # what diagnose finds in a text, so that it is no error
    "latin-1", "utf-16", "utf-16 without a mark", "NUL bytes", "lone surrogates", "random bytes",
    "a line less", "a line more", "blank lines",
}  # fmt: skip


def diagnosed() -> Iterator[Case]:
    """Every bad text on both sides of what is diagnosed: findings are no error."""
    for kind, (path, make) in {**BAD_TEXTS, **SHORT, **BLANK}.items():
        for number, side in ((1, "source"), (2, "target")):
            words = ["diagnose", "@text/valid.de", "@text/valid.en"]
            words[number] = path
            yield Case(
                f"diagnose, {side}: {kind}",
                tuple(words),
                make,
                status=(0,) if kind in FOUND else (2,),
                names=re.split(r"[\n/]", path)[0] if path else "empty",
                job={"user": kind == "unreadable"},
            )


def texts() -> Iterator[Case]:
    """Every bad text at every place where one is read."""
    for where, (line, number) in PLACES.items():
        command = where.split(",")[0]
        kinds = {**BAD_TEXTS, **({} if command in ("translate", "parse", "recipe") else SHORT)}
        kinds |= BLANK if command in ("train", "prepare", "score") else {}
        for kind, (path, make) in kinds.items():
            words = line.split()
            words[number] = path
            names = re.split(r"[\n/]", path)[0] if path else "empty"
            dropped = {"prepare": ("blank lines", "lone surrogates"), "train": ("blank lines",)}
            if kind in dropped.get(command, ()):
                names = ""  # such lines are dropped, and nothing is left
            yield Case(
                f"{where}: {kind}",
                tuple(words),
                make,
                names=names,
                logs=command == "prepare",
                writes="p(/.*)?" if command == "prepare" else "",
                job={"user": kind == "unreadable"},
            )


COMPLETE = {  # lines that work, but for what is added
    "train": TRAIN,
    "translate": "translate @run @text/is --quiet -o out",
    "serve": "serve @run --port 0",
    "parse": "parse @parser @text/is --quiet -o out",
    "evaluate": "evaluate @run --corpus grammar",
    "score": "score @run @text/valid.de @text/valid.en --quiet -o out",
    "diagnose": "diagnose @text/valid.de @text/valid.en",
    "compare": "compare @text/is @text/is --references @text/is",
    "ablation": "ablation @run",
    "average": "average @run",
    "plot": "plot @run",
    "export": "export @run out --to ctranslate2",
    "prepare": PREPARE,
    "sweep": "sweep table3-grammar --plan",
}
NUMBERS = {
    int: ("x", "1.5", "-1", "99999999999999999999"),
    float: ("x", "nan", "-1", "1e999"),
}


def options_of(kind: Any) -> Iterator[tuple[str, Any]]:
    """Go through the options of a command, with their types."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        if is_dataclass(hints[each.name]):
            yield from options_of(hints[each.name])
        else:
            yield f"--{each.name.replace('_', '-')}", hints[each.name]


def misspelt(option: str) -> str:
    """Return an option with two letters exchanged."""
    middle = len(option) // 2
    return option[:middle] + option[middle + 1] + option[middle] + option[middle + 2 :]


def option_values() -> Iterator[Case]:
    """Bad values of every option that takes one, every option misspelt, and what is no option."""
    for kind in COMMANDS:
        command = kind.__name__.lower()
        line, positional = (
            COMPLETE[command],
            (*("--model", "--input", "--first", "--second", "--out", "--source", "--target"),),
        )
        for option, hint in options_of(kind):
            if option in positional and command != "train":
                continue
            kinds = (hint, *get_args(hint))
            values = [value for each in NUMBERS if each in kinds for value in NUMBERS[each]]
            values += ["nothing-such"] if "Literal" in str(hint) else []
            values += [""] if hint is not bool else []
            for value in values:
                names = "" if option == "--last" else option
                words = (*line.split(), option, value)
                yield Case(f"{command} {option} {value or 'with nothing'}", words, names=names)
            if len(option) > 6 and (wrong := misspelt(option)) != option:
                names = f"did you mean {option}?"
                yield Case(f"{command} {wrong}", f"{line} {wrong} 1", names=names)
        for more in ("--no-such-option", "-z", "stray more", "---", "--help=x", "--quiet=x"):
            yield Case(f"{command} {more}", f"{line} {more}")


CONTRADICTIONS = """
train --corpus grammar --mirror m                       | --mirror
train --corpus grammar --prepared p                     | --prepared
train --corpus prepared                                 | --prepared
train --corpus files --train-files a b                  | --valid-files
train --valid-files a b                                 | --train-files
train --corpus wmt14                                    | wmt14
train --corpus grammar --phrases                        | --phrases
train --model rnn --heads 2                             | --heads
train --model rnn --norm pre                            | --norm
train --model rnn --compile                             | --compile
train --model convolution --tie all                     | --tie
train --d-model 10 --heads 3 --size 9 --vocabulary 300  | 10
train --sharded --size 9 --vocabulary 300 --out run     | --sharded
train --device cuda --size 9 --vocabulary 300           | --device
train --precision tf32 --size 9 --vocabulary 300        | --precision
train --average 0 --average-every 5                     | --average-every
train --tokenizer words --size 9 --tie all              | tie
train --pair de-de                                      | de-de
train --pair xx                                         | xx
train --pair de-fr                                      | fr
train --lr 0.1                                          | --peak
train --corpus multi30k --mirror nowhere                | nowhere
train --corpus iwslt2014 --pair de-fr --mirror nowhere  | fr
train --recipe grammar.json                             | grammar.json
train --recipe nothing                                  | nothing
train --max-len 2 --size 50 --vocabulary 300 --quiet    | --max-len
train --max-tokens 2 --size 50 --vocabulary 300 --quiet | --max-tokens
train --vocabulary 5 --size 50 --quiet                  | --vocabulary
train --corpus treebank --pair de-en                    | en-trees
train --corpus treebank --mirror nowhere                | nowhere
train --corpus grammar-trees --mirror m                 | --mirror
train --pair en-trees                                   | en-trees
prepare p --pair en-trees --train-files @text/dogs.en @text/dogs.trees --valid-files a b | --pair
translate @run @text/is --quiet --averaged --best               | --averaged
translate @run @text/is --quiet --beam 1 --alpha 1.5            | --alpha
translate @run @text/is --quiet --beam 0                        | --beam
translate @run @text/is --quiet --beam 999                      | --beam
translate @run @text/is --quiet --alpha 11                      | --alpha
translate @run @text/is --quiet --device cuda                   | --device
translate @run @text/is --quiet --precision int4                | --precision
serve @run --precision float16                          | --precision
evaluate --hypotheses @text/is --references @text/is --precision int8 | --precision
score @run @text/is @text/is --precision int8           | --precision
translate @run @text/is --temperature 0.5               | --temperature
translate @run @text/is --top-k 5                       | --top-k
translate @run @text/is --top-p 0.5                     | --top-p
translate @run @text/is --seed 5                        | --seed
translate @run @text/is --sample --beam 2               | --beam
translate @run @text/is --sample --alpha 1              | --alpha
translate @run @text/is --sample --temperature 0        | --temperature
translate @run @text/is --sample --temperature inf      | --temperature
translate @run @text/is --sample --top-p 0              | --top-p
translate @run @text/is --sample --top-p 1.5            | --top-p
translate @run @text/is --sample --top-k -1             | --top-k
translate @run @text/is --n-best 0                      | --n-best
translate @run @text/is --n-best 5 --beam 4             | --n-best
translate @run @text/is --n-best 1001                   | --n-best
translate @run @text/is --n-best 2 --scores             | --scores
translate @run @text/is --n-best 999 --quiet            | --n-best
translate @run @text/is --ensemble @other               | other
translate @run @text/is --ensemble nowhere              | nowhere
translate @run @text/is --ensemble @parser              | parser
translate @text/is --ensemble @run                      | --ensemble
translate @run @text/is --ensemble @run -o @run/config.json | config.json
translate @run @text/is --interactive                   | --interactive
translate @run --interactive -o out                     | --interactive
translate @run @text/is --nbest 3                       | --n-best
translate @run @text/is --num-return-sequences 3        | --n-best
translate @run @text/is --do-sample                     | --sample
score                                                   | MODEL
score nowhere @text/is @text/is                         | nowhere
score @run @text/is                                     | TARGET
score @run @text/is @text/latin                         | latin
score @run @text/is @text/is --averaged --best          | --averaged
score @run @text/is @text/is --device cuda              | --device
score @run @text/is @text/is -o @text/is                | is
score @run @text/is @text/is -o @run/config.json        | config.json
score @run @text/is @text/is --ensemble @other --quiet  | other
score @run @text/is @text/is --beam 2                   | --beam
score @parser @text/dogs.en @text/dogs.trees            | parser
score @text @text/is @text/is                           | text
diagnose                                                | SOURCE
diagnose @text/is                                       | TARGET
diagnose @text/is @text/is --valid-files a              | --valid-files
diagnose @text/is @text/is --valid-files nowhere @text/is | nowhere
diagnose @text/is @text/is --valid-files @text/is @text/latin | latin
diagnose @text/is @text/is --max-words 0                | --max-words
diagnose @text/is @text/is --max-ratio 0.5              | --max-ratio
diagnose @text/is @text/is --max-ratio nan              | --max-ratio
diagnose @text/is @text/is --examples 1001              | --examples
diagnose @text/is @text/is --quiet                      | --quiet
train --finetune-from nowhere                           | nowhere
train --finetune-from @text                             | text
train --finetune-from @run --vocabulary 300             | --vocabulary
train --finetune-from @run --tokenizer words            | --tokenizer
train --finetune-from @run --preset base                | --preset
train --finetune-from @run --model rnn                  | --architecture
train --finetune-from @run --corpus grammar --d-model 16 --size 9 --quiet | --d-model
train --finetune-from @run --corpus grammar --layers 2 --size 9 --quiet | --layers
train --finetune-from @run --corpus grammar --pair en-de --size 9 --quiet | --pair
train --finetune-from @run --corpus grammar --size 9 --out @run | --out
train --finetune-from @parser --corpus grammar --size 9 | en-trees
train --finetune-from @run                              | --train-files
train --init @run                                       | --finetune-from
train --best-metric bleu                                | --eval-bleu
train --eval-bleu --sharded                             | --eval-bleu
train --eval-bleu --pair en-trees --corpus grammar-trees | --eval-bleu
train --patience 0                                      | --patience
train --validate-every 0                                | --validate-every
train --early-stopping 3                                | --patience
translate @text @text/is                                | text
translate @text/is @text/is                             | is
translate nowhere                                       | nowhere
translate --averaged                                    | --averaged
translate --best                                        | --best
translate --beam 0                                      | --beam
translate --beam 9999                                   | --beam
translate @text/latin                                   | latin
serve nowhere                                           | nowhere
serve @text                                             | text
serve @text/is                                          | is
serve @parser                                           | parse
serve --averaged                                        | --averaged
serve --best                                            | --best
serve @run --averaged --best --port 0                   | --averaged
serve @run --device cuda --port 0                       | --device
serve --port 65536                                      | --port
serve --host no.such.host.invalid                       | --host
serve --host 256.1.1.1                                  | --host
serve --host 203.0.113.1                                | --host
serve --queue 0                                         | --queue
serve --timeout 0                                       | --timeout
serve --beam 4                                          | --beam
parse                                                   | --corpus treebank
parse nowhere                                           | nowhere
parse @run @text/is --quiet                             | treebank
parse @text @text/is                                    | text
parse @parser @text/latin                               | latin
parse @parser @text/is --sentence dogs                  | --sentence
parse @parser @text/is --extra 0                        | --extra
parse @parser @text/is --beam 1 --alpha 1               | --alpha
parse @parser @text/is --beam 999                       | --beam
parse @parser @text/is --format svg                     | --format
parse @parser @text/is --format html                    | --format
parse @parser @text/is -o @parser/config.json           | config.json
parse @parser @text/is --averaged --best                | --averaged
translate @parser @text/is                              | parse
ablation @parser                                        | evaluate
evaluate @parser                                        | --test-files
evaluate @parser --corpus grammar                       | en-trees
evaluate @parser --corpus treebank --split nope         | nope
evaluate @parser --corpus treebank --protocols          | --protocols
evaluate @parser --test-files @text/dogs.en @text/is    | is, line 1
evaluate                                                | --hypotheses
evaluate nowhere                                        | nowhere
evaluate @run                                           | --test-files
evaluate @run --test-files a b --corpus grammar         | --test-files
evaluate @run --test-files nowhere @text/test.en        | nowhere
evaluate @run --test-files a                            | --test-files
evaluate @run --corpus grammar --split nope             | nope
evaluate @run --corpus grammar --mirror m               | --mirror
evaluate @run --corpus nope                             | nope
evaluate @run --corpus grammar --prepared p             | --prepared
evaluate @run --prepared nowhere                        | nowhere
evaluate @run --prepared p --test-files a b             | --test-files
evaluate @run --corpus grammar --ensemble @other        | other
evaluate @run --corpus grammar --ensemble @parser       | parser
evaluate @run --corpus grammar --ensemble nowhere       | nowhere
evaluate @parser --corpus grammar-trees --ensemble @parser | --ensemble
evaluate --hypotheses @text/is --references @text/is --ensemble @run | --ensemble
evaluate @text/is                                       | is a file
export @text/is --to onnx new/out                       | is a file
evaluate @run --language de                             | --language
evaluate @run --hypotheses @text/is                     | --hypotheses
evaluate --hypotheses @text/is                          | --references
evaluate --references @text/is                          | --hypotheses
evaluate --hypotheses @text/is --references @text/is --beam 2        | --beam
evaluate --hypotheses @text/is --references @text/is --alpha 1       | --alpha
evaluate --hypotheses @text/is --references @text/is --averaged      | --averaged
evaluate --hypotheses @text/is --references @text/is --device cpu    | --device
evaluate --hypotheses @text/is --references @text/is --corpus grammar | --corpus
evaluate --hypotheses @text/is --references @text/is --split val     | --split
evaluate --hypotheses @text/is --references @text/is --test-files @text/is @text/is | --test-files
evaluate --hypotheses @text/is --references @text/is --language de   | --language
evaluate --hypotheses @text/is --references @text/is --protocols     | --language
evaluate --hypotheses @text/is --references @text/is --protocols --language xx | xx
evaluate @run --corpus grammar --beam 1 --alpha 1       | --alpha
compare @text/is                                        | compare
compare @text/is @text/is                               | --references
compare @text/is @text/is --references @text/is --samples 1 | --samples
ablation                                                | ablation
ablation nowhere                                        | nowhere
ablation @run --mirror m                                | files
sweep                                                   | GRID
sweep nope                                              | nope
sweep @text                                             | text
sweep @text/is                                          | is
sweep table3-grammar --jobs 0                           | --jobs
sweep table3-grammar --seeds 0                          | --seeds
sweep table3-grammar --rows Z                           | --rows
sweep table3-grammar --mirror m                         | --mirror
sweep table3-grammar --record @text                     | --record
average nowhere                                         | nowhere
average @run --last 0                                   | 0
average @run --last 9                                   | 9
plot nowhere                                            | nowhere
plot @run -o picture.gif                                | .gif
plot @run -o picture                                    | .svg
export @run out                                         | --to
export                                                  | --to
export --to onnx                                        | new
export @run out more --to onnx                          | more
export @run out --to onnx --precision int8              | --precision
export @run out --to huggingface --precision float32    | --precision
export @run out --to ctranslate2 --precision float16    | float16
export nowhere out --to ctranslate2                     | nowhere
export @text out --to ctranslate2                       | text
export @text/is out --to ctranslate2                    | is
export @run @other --to ctranslate2                     | other
export @run @text/is --to ctranslate2                   | is
export @text/is --to ctranslate2                        | is
export @run @run --to ctranslate2                       | run
export @parser out --to ctranslate2                     | parser
export @run @text/is/out --to ctranslate2               | out
export @run /proc/out --to ctranslate2                  | /proc/out
prepare p                                               | --train-files
prepare p --corpus nope                                 | nope
prepare p --corpus grammar --mirror m                   | --mirror
prepare p --corpus grammar --test-files a b             | --test-files
prepare p --train-files @text/train.de --valid-files @text/valid.de @text/valid.en | --train-files
prepare p --train-files @text/train.de @text/train.en   | --valid-files
prepare p --vocabulary 5 --corpus grammar               | --vocabulary
prepare p --pair de-/../x --corpus grammar              | de-/../x
prepare p --corpus multi30k --mirror nowhere            | nowhere
trian                                                   | train
TRAIN                                                   | train
                                                        | train
--updates 5                                             | train
-h5                                                     | -h5
"""


def contradictions() -> Iterator[Case]:
    """Options that cannot be meant together, or have no effect."""
    for row in CONTRADICTIONS.strip("\n").splitlines():
        line, _, names = row.rpartition("|")
        line, names = " ".join(line.split()), names.strip()
        logs = line.startswith("train") and "--size" in line  # it has begun
        writes = "p(/corpus.*)?" if line.startswith("prepare") else ""
        yield Case(line or "no words", line, names=names, logs=logs, writes=writes)
