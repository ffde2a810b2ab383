"""Tab in the lines of the magics: options, their values, models and datasets of the notebook, runs, files.

A matcher for IPython's completer (API version 2); it speaks up in these lines only, and keeps the other matchers out of them. Runs in the kernel; looks
at torch only where the notebook has imported it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.completer import SimpleCompletion, context_matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from IPython.core.completer import CompletionContext, Matcher, SimpleMatcherResult
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.kernel.line import Word
    from nbddp.kernel.options import Option

_MAGIC = re.compile(r"(?:^|[\s=])%{1,2}(ddp_[a-z]+)[ \t]+(.*)$")
_OFFERED_RUNS = 50
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
"""What files of weights are called: `nbddp.checkpoint`, which knows them by their content, imports torch."""

Offer = tuple[str, str]
"""A completion and its kind."""


def matcher(shell: InteractiveShell) -> Matcher:
    """Return the matcher for a shell."""

    def match(context: CompletionContext) -> SimpleMatcherResult:
        found = _MAGIC.search(context.text_until_cursor)
        if found is None:
            return {"completions": [], "suppress": False}
        fragment, offers, ours = complete(found[1], found[2], shell.user_ns)
        completions = [SimpleCompletion(text=text, type=kind) for text, kind in offers]
        if ours and not completions and fragment:
            completions = [SimpleCompletion(text=fragment)]  # nothing to offer: the word as it is, instead of unrelated names
        return {"completions": completions, "matched_fragment": fragment, "suppress": ours}

    marked: Matcher = context_matcher(identifier="nbddp", priority=1000)(match)
    return marked


def complete(magic: str, text: str, names: Mapping[str, Any]) -> tuple[str, list[Offer], bool]:
    """What can follow `text`, the line of a magic up to the cursor.

    Returns the part of it that an offer replaces, the offers, and whether they are all that makes sense there.
    """
    from nbddp.errors import ConfigError
    from nbddp.kernel.line import scan

    options = _options(magic)
    if options is None:
        return "", [], False
    try:
        words, end, still_open = scan(text)
    except ConfigError:  # a quote in the middle of a word: no telling what it is going to be
        return "", [], False
    last = words.pop() if words and (still_open or not text[-1:].isspace()) else None
    if end < len(text) or (last is not None and (last.quoted or still_open)):  # in a comment, in a string, in brackets
        return "", [], False
    fragment = "" if last is None else text[last.start :]
    position, given, pending = _read(words, options)
    if pending is not None:
        return _starting(fragment, _values(pending, fragment, names), pending)
    if last is not None and last.is_option and "=" in fragment:
        flag, _, value = fragment.partition("=")
        option = options.get(_name(flag))
        return ("", [], True) if option is None else _starting(value, _values(option, value, names), option)
    if fragment.startswith("-"):
        return fragment, _flags(fragment, options, given), True
    if re.search(r"[.\[(]", fragment) and not (magic == "ddp_load" and position == 1):  # an expression: IPython's own matchers know attributes and keys
        return "", [], False
    if (choose := _word_offers(magic, position, fragment)) is not None:
        offers = [offer for offer in choose(names) if offer[0].startswith(fragment)]
        return fragment, offers or ([] if fragment else _flags("", options, given)), True
    if fragment and words and words[-1].is_option:  # the value that a flag may have
        return fragment, [(word, "value") for word in ("true", "false") if word.startswith(fragment)], True
    return fragment, [] if fragment else _flags("", options, given), True


def _options(magic: str) -> dict[str, Option] | None:
    from nbddp.kernel.options import ATTACH_OPTIONS, CONFIG_OPTIONS, LOAD_OPTIONS, RUNS_OPTIONS, train_options

    if magic in ("ddp_train", "ddp_plan"):
        return train_options()
    if magic == "ddp_config":
        return CONFIG_OPTIONS | train_options()
    return {"ddp_runs": RUNS_OPTIONS, "ddp_attach": ATTACH_OPTIONS, "ddp_load": LOAD_OPTIONS, "ddp_stop": {}, "ddp_stacks": {}}.get(magic)


def _name(flag: str) -> str:
    from nbddp.config import SYNONYMS

    word = flag.lstrip("-").replace("-", "_")
    return SYNONYMS.get(word, word)


def _read(words: Iterable[Word], options: Mapping[str, Option]) -> tuple[int, set[str], Option | None]:
    """How many words stand for themselves, which options were given, and the one that waits for its value."""
    position, given, pending = 0, set(), None
    for word in words:
        if pending is not None:
            pending = None
        elif word.is_option:
            flag, equals, _ = word.text.partition("=")
            given.add(_name(flag))
            option = options.get(_name(flag))
            pending = option if option is not None and not option.flag and not equals else None
        elif word.text.lower() not in ("true", "false"):
            position += 1
    return position, given, pending


def _starting(fragment: str, offers: Iterable[Offer], option: Option) -> tuple[str, list[Offer], bool]:
    found = [offer for offer in offers if offer[0].startswith(fragment)]
    return fragment, found, bool(found) or not (option.metavar == "EXPR" and re.search(r"[.\[(]", fragment))


def _flags(fragment: str, options: Mapping[str, Option], given: set[str]) -> list[Offer]:
    wanted = fragment.replace("_", "-")
    names = [option.spelling for name, option in options.items() if name not in given]
    if wanted.startswith("--no"):
        names += [f"--no-{name.replace('_', '-')}" for name, option in options.items() if option.flag and option.default is True and name not in given]
    return [(flag, "option") for flag in names if flag.startswith(wanted)]


def _values(option: Option, fragment: str, names: Mapping[str, Any]) -> list[Offer]:
    if option.words:
        runs = _runs() if option.name == "init" else []
        return [(word, "value") for word in option.words] + runs
    special: dict[str, Callable[[], list[Offer]]] = {
        "val": lambda: _datasets(names),
        "loss": lambda: _losses(names),
        "config": lambda: _paths(fragment, (".yaml", ".yml", ".json")),
        "root": lambda: _paths(fragment, ()),
        "run_root": lambda: _paths(fragment, ()),
        "from": lambda: [*_runs(), *_paths(fragment, (".yaml", ".yml", ".json"))],
        "as": lambda: [("run", "instance")],
        "init": lambda: [("current", "value"), ("initial", "value"), *_runs()],
        "resume": lambda: [("last", "value"), *_runs()],
        "norm": lambda: [(word, "value") for word in _norms()],
    }
    if option.name in special:
        return special[option.name]()
    default = [] if option.default is None else [(f'"{option.default}"' if " " in str(option.default) else str(option.default), "default")]
    numbers = [(f"{{{name}}}", "instance") for name, value in _public(names) if isinstance(value, int | float) and not isinstance(value, bool)]
    return default + ([] if option.text else numbers)


def _norms() -> tuple[str, ...]:
    from nbddp.values import NORMS

    return NORMS


def _word_offers(magic: str, position: int, fragment: str) -> Callable[[Mapping[str, Any]], list[Offer]] | None:
    """What the next word that stands for itself can be."""
    chosen: dict[tuple[str, int], Callable[[Mapping[str, Any]], list[Offer]]] = {
        ("ddp_train", 0): _modules,
        ("ddp_train", 1): _datasets,
        ("ddp_plan", 0): _modules,
        ("ddp_plan", 1): _datasets,
        ("ddp_config", 0): _modules,
        ("ddp_config", 1): _datasets,
        ("ddp_load", 0): _modules,
        ("ddp_load", 1): lambda names: [*_runs(), *(offer for offer in _paths(fragment, CHECKPOINTS) if fragment or not offer[0].endswith("/"))],
        ("ddp_attach", 0): lambda names: _runs(),
        ("ddp_stop", 0): lambda names: _runs(),
        ("ddp_stacks", 0): lambda names: _runs(),
    }
    return chosen.get((magic, position))


def _public(names: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in list(names.items()) if not name.startswith("_")]


def _instances(names: Mapping[str, Any], *kinds: str) -> list[Offer]:
    """Names of the instances of torch's classes; none where torch isn't imported, since then there are none."""
    classes = tuple(getattr(sys.modules[module], cls) for module, cls in (kind.rsplit(".", 1) for kind in kinds) if module in sys.modules)
    return [(name, "instance") for name, value in _public(names) if isinstance(value, classes)]


def _modules(names: Mapping[str, Any]) -> list[Offer]:
    losses = _instances(names, "torch.nn.modules.loss._Loss")
    return [offer for offer in _instances(names, "torch.nn.Module") if offer not in losses]


def _datasets(names: Mapping[str, Any]) -> list[Offer]:
    return _instances(names, "torch.utils.data.Dataset", "torch.utils.data.DataLoader")


def _losses(names: Mapping[str, Any]) -> list[Offer]:
    losses = _instances(names, "torch.nn.modules.loss._Loss")
    named = [(name, "function") for name, value in _public(names) if callable(value) and re.search("loss|criterion", name, re.IGNORECASE)]
    return losses + [offer for offer in named if offer[0] not in dict(losses)]


def losses(names: Mapping[str, Any]) -> list[str]:
    """Names of the notebook that look like a loss."""
    return [name for name, _ in _losses(names)]


def suggestions(option: Option, names: Mapping[str, Any]) -> list[str]:
    """The values of an option that are offered before anything of one is written."""
    return [text for text, _ in _values(option, "", names)]


def _runs() -> list[Offer]:
    """Ids of the newest runs of this notebook, the newest first."""
    from nbddp.rundir import run_dirs
    from nbddp.runroot import run_root

    return [(run.id, "run") for run in run_dirs(run_root(fix=False))[: -_OFFERED_RUNS - 1 : -1]]


def _paths(fragment: str, suffixes: tuple[str, ...]) -> list[Offer]:
    """Folders, and files with one of the suffixes, that a path can go on with."""
    head, slash, _ = fragment.rpartition("/")
    folder = Path(head + slash).expanduser() if head or slash else Path()
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    offers = [(f"{head}{slash}{path.name}", path) for path in found if not path.name.startswith(".")]
    return [(text + "/", "path") if path.is_dir() else (text, "path") for text, path in offers if path.is_dir() or path.suffix in suffixes]
