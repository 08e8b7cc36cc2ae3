"""Writes docs/api.md from what the code says of itself; a test compares. `make api` runs it.

The sources are only read, never imported: a framework that an adapter is for need not be there. What is
public is what the modules below export, and of `run` what a script also has without an agent around it.
"""

import ast
import copy
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PAGE = Path(__file__).parent / "api.md"
HEAD = """# What a script may use

Made from the code (`make api`). How it fits together: [the first job](tutorials/first-job.md),
[a script of your own](tutorials/your-script.md), [the quickstart](quickstart.md).
[What belongs into the State](porting.md#what-belongs-into-the-state) is to be gone through for each script;
its last step is [a rehearsal](rehearsal.md), `ckptless-run --rehearse train.py`.

```python
import ckptless

def build():                                  # once in each process
    ...
    return ckptless.State(model=model, optimizer=optimizer, loader=loader)

def train(run):                               # again after each fault
    state = run.keep(build)
    for batch in run.batches(state.loader):
        ...
        state.optimizer.step()
        run.commit(loss=loss)

ckptless.run(train)
```

What is on this page is meant for scripts; other modules and names below `ckptless` may change from version to
version. Units are in names: `_s` is seconds, `_nbytes` is bytes.
"""
# Each module that exports something for scripts, and what there is to say of it.
MODULES = {
    "ckptless": ("The script", ""),
    "ckptless.data": (
        "Training data",
        "`from ckptless.data import MappedLoader`; needs `pip install 'ckptless[data]'`. "
        "[Training data](data.md) has the order, and what is guaranteed.",
    ),
    "ckptless.lightning": ("Lightning", "`import ckptless.lightning`. See [Lightning](lightning.md)."),
    "ckptless.transformers": (
        "transformers",
        "`import ckptless.transformers`. See [transformers](transformers.md).",
    ),
    "ckptless.accelerate": ("Accelerate", "`import ckptless.accelerate`. See [Accelerate](accelerate.md)."),
    "ckptless.torchtitan": ("torchtitan", "`import ckptless.torchtitan`. See [torchtitan](torchtitan.md)."),
}
RUN = "ckptless.pytorch_hooks.running.training:Run"
ALONE = "ckptless.pytorch_hooks.running.standalone:StandaloneRun"
EXACT = "ckptless.pytorch_hooks.elastic.exact:ExactSteps"
# Of other classes these are for scripts; the rest is what `run` and agents call.
MEMBERS = {
    "JsonLines": ("damage",),
    "MappedLoader": ("set_epoch", "state_dict", "load_state_dict", "manifest", "skipped"),
}
PROTOCOL, HOOKS = "ckptless.daemon.protocol.errors", "ckptless.pytorch_hooks.errors"
# What a script may see raised, the reasons before the consequences; the rest of the tree is of daemons.
ERRORS = {
    PROTOCOL: (
        *("CkptlessError", "UsageError", "NoRoomError", "DataError", "BadRecordError", "ProtocolError"),
        *("RecoveryError", "StateUnavailableError"),
    ),
    HOOKS: (
        *(
            "GenerationEnded",
            "DeviceLost",
            "CollectiveFailed",
            "StateMoved",
            "FrozenChanged",
            "TorchMismatch",
        ),
    ),
}
ERRORS_HEAD = """## Errors

The text of a `UsageError` is one sentence that says what to change. A training function need catch none of
these: what it raises is a fault like any other, and the same three times without a step in between ends the
job. `GenerationEnded` and `DeviceLost` are no `Exception`, so that an `except Exception:` around a step does
not swallow them; a bare `except:` or `except BaseException:` has to raise them again.

| error | is a | import from | |
| --- | --- | --- | --- |"""
VARIABLES = {
    "RANK": "the number of this process among all; -1 in a spare that waits",
    "LOCAL_RANK": "its number on its node",
    "WORLD_SIZE": "number of ranks; in a script read `run.world_size`",
    "LOCAL_WORLD_SIZE": "ranks on each node",
    "GROUP_RANK": "the number of the node",
    "MASTER_ADDR": "where the store of the process groups is",
    "MASTER_PORT": "its port",
    "TORCHELASTIC_RUN_ID": "the job's name (`ckptctl jobs`)",
    "OMP_NUM_THREADS": "1 where it was not set and several ranks share a machine",
    "CKPTLESS_AGENT_SOCKET": "is there where a rank is protected; to be read, not to be set",
    "CKPTLESS_LOG_FORMAT": "`json` where ckptless logs lines of JSON in a rank, of `--log-format`",
    "CKPTLESS_POLICY": "values for each number of nodes as JSON, of `--elastic-policy`: read `run.policy`",
    "CKPTLESS_REHEARSAL": "is there in [a rehearsal](rehearsal.md) alone",
    "CKPTLESS_DATA_CACHE": "a folder for what `ckptless.data` unpacks and counts; yours to set",
}
VARIABLES_HEAD = """## Environment

What ranks find in their environment; what `ckptless-run` itself reads is in
[ckptless-run(1)](man/ckptless-run.1).

| variable | |
| --- | --- |"""
WIDTH = 100


def page() -> str:
    """Return all of the page."""
    parts = [HEAD]
    for module, (title, text) in MODULES.items():
        parts += [f"## {title}\n", *([f"{text}\n"] if text else [])]
        for name in exported(module):
            if name != "Run":
                parts.append(_entry(f"{module}.{name}", *found(module, name)))
        if module == "ckptless":
            parts += [*_run(), *_exact()]
    return "\n".join([*parts, *_errors(), *_variables()])


# ----------------------------------------------------------------------------------- reading the sources


@cache
def _tree(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split("."))
    inner = path / "__init__.py"
    return ast.parse((inner if inner.exists() else path.with_suffix(".py")).read_text())


def exported(module: str) -> list[str]:
    """Return what a module has in `__all__`: functions, then classes."""
    for name, value in _assigned(module):
        if name == "__all__":
            words = [word for word in ast.literal_eval(value) if not word.startswith("_")]
            return sorted(words, key=lambda word: (word[0].isupper(), word))
    raise LookupError(f"{module} has no __all__")


def _assigned(module: str) -> Iterator[tuple[str, ast.expr]]:
    for node in _tree(module).body:
        if isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value


def _comes_from(module: str, name: str) -> str | None:
    """Return the module of ours that a name is imported from, if it is."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and name in [one.name for one in node.names]:
            return node.module if (node.module or "").startswith("ckptless") else None
    return None


def found(module: str, name: str) -> tuple[str, ast.FunctionDef | ast.ClassDef]:
    """Return where a name is defined that a module has, over imports, and its definition."""
    for node in _tree(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return module, node
    source = _comes_from(module, name)
    if source is None:
        raise LookupError(f"{module} has no {name}")
    return found(source, name)


class _Plain(ast.NodeTransformer):
    """Puts what a name of a module stands for in its place, where that is an expression."""

    def __init__(self, module: str) -> None:
        self._module = module

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Look a name up, over imports."""
        module: str | None = self._module
        while module is not None:
            for name, value in _assigned(module):
                if name == node.id:
                    return value
            module = _comes_from(module, node.id)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Take the quotes off a name that is given ahead."""
        return ast.Name(node.value) if node.value == "Run" else node


def _plain(module: str, node: ast.expr) -> str:
    return ast.unparse(_Plain(module).visit(copy.deepcopy(node)))


def class_at(place: str) -> ast.ClassDef:
    """Return the class at "module:name"."""
    node = found(*place.split(":"))[1]
    assert isinstance(node, ast.ClassDef)
    return node


def methods(owner: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Return the methods and properties of a class that are public, as they come."""
    return {
        one.name: one
        for one in owner.body
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")
    }


def of_run() -> dict[str, ast.FunctionDef]:
    """Return what a script may use of `run`: what there is under an agent and without one."""
    alone = class_at(ALONE)
    names = {*methods(alone)}
    for node in ast.walk(alone):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Assign):
            names.update(one.id for one in node.targets if isinstance(one, ast.Name))
    return {name: one for name, one in methods(class_at(RUN)).items() if name in names}


def _decorated(node: ast.FunctionDef, word: str) -> bool:
    return any(ast.unparse(one) == word for one in node.decorator_list)


# --------------------------------------------------------------------------------------- what is written


def _run() -> Iterator[str]:
    members = of_run()
    yield "## run\n\nWhat the training function is given, and `ckptless.protect` returns.\n"
    yield f"{_words(class_at(RUN))}\n"
    yield "| attribute | | |\n| --- | --- | --- |"
    for name, node in members.items():
        if _decorated(node, "property"):
            assert node.returns is not None
            yield f"| `run.{name}` | `{ast.unparse(node.returns)}` | {' '.join(_words(node).split())} |"
    yield ""
    for name, node in members.items():
        if not _decorated(node, "property"):
            yield _entry(f"run.{name}", RUN.partition(":")[0], node)


def _exact() -> Iterator[str]:
    """Yield the entries of `run.exact`."""
    for name, node in methods(class_at(EXACT)).items():
        yield _entry(f"run.exact.{name}", EXACT.partition(":")[0], node)


def _entry(shown: str, module: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return one heading with the way it is called and its words, and those of what it has."""
    lines = [f"### {shown}\n", "```py", _call(shown, module, node), "```\n", f"{_words(node)}\n"]
    if isinstance(node, ast.ClassDef):
        members = methods(node)
        for name in MEMBERS.get(node.name, ()):
            call = _call(f".{name}", module, members[name])
            lines.append(f"- `{call}`: {' '.join(_words(members[name]).split())}")
        if node.name in MEMBERS:
            lines.append("")
    return "\n".join(lines)


def _words(node: ast.FunctionDef | ast.ClassDef) -> str:
    text = ast.get_docstring(node)
    if text is None:
        raise LookupError(f"{node.name} has no docstring")
    return text


def _call(shown: str, module: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return how something is called, a parameter a line where that is long."""
    if isinstance(node, ast.FunctionDef) and _decorated(node, "property"):
        assert node.returns is not None
        return f"{shown}: {ast.unparse(node.returns)}"
    parameters = _parameters(module, node)
    returns = node.returns if isinstance(node, ast.FunctionDef) else None
    end = "" if returns is None else f" -> {_plain(module, returns)}"
    if isinstance(node, ast.FunctionDef) and _decorated(node, "contextmanager"):
        shown, end = f"with {shown}", ":"
    flat = f"{shown}({', '.join(parameters)}){end}"
    if len(flat) <= WIDTH:
        return flat
    return "\n".join([f"{shown}(", *(f"    {one}," for one in parameters), f"){end}"])


def _parameters(module: str, node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return what a function takes, or a class: its `__init__`, a base's, or the fields of a dataclass."""
    if isinstance(node, ast.FunctionDef):
        return _arguments(module, node)
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return _arguments(module, one)
    if any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        return [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
    base = node.bases[0]
    assert isinstance(base, ast.Name)
    return _parameters(*found(module, base.id))


def _arguments(module: str, node: ast.FunctionDef) -> list[str]:
    given = node.args
    missing: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults))
    shown = [_parameter(module, *one) for one in zip(given.args, [*missing, *given.defaults], strict=True)]
    if given.args and given.args[0].arg == "self":
        shown = shown[1:]
    if given.vararg is not None:
        shown.append(f"*{given.vararg.arg}")
    keywords = [_parameter(module, *one) for one in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    rest = []
    if given.kwarg is not None:
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", ast.unparse(given.kwarg.annotation or given.kwarg))
        if unpacked:
            keywords += _fields(module, unpacked[1])
        else:
            rest = [f"**{_parameter(module, given.kwarg, None)}"]
    star = ["*"] if keywords and given.vararg is None else []
    return [*shown, *star, *keywords, *rest]


def _fields(module: str, name: str) -> list[str]:
    """Return the keywords that a TypedDict names, each of which may be left out."""
    module, node = found(module, name)
    return [
        f"{ast.unparse(one.target)}: {_plain(module, one.annotation)} = ..."
        for one in node.body
        if isinstance(one, ast.AnnAssign)
    ]


def _parameter(module: str, one: ast.arg, default: ast.expr | None) -> str:
    words = one.arg if one.annotation is None else f"{one.arg}: {_plain(module, one.annotation)}"
    if default is None:
        return words
    return f"{words}{'=' if one.annotation is None else ' = '}{_plain(module, default)}"


def _errors() -> Iterator[str]:
    yield ERRORS_HEAD
    for module, names in ERRORS.items():
        for name in names:
            node = found(module, name)[1]
            assert isinstance(node, ast.ClassDef)
            words = inspect.cleandoc(_words(node)).partition("\n\n")[0].replace("\n", " ")
            yield f"| `{name}` | `{ast.unparse(node.bases[0])}` | `{module}` | {words} |"
    yield ""


def _variables() -> Iterator[str]:
    yield VARIABLES_HEAD
    yield from (f"| `{name}` | {words} |" for name, words in VARIABLES.items())
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
