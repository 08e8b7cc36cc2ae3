"""Every wait in the project has a deadline, or says on its line why it needs none: `# no deadline: REASON`.

Seen as a wait is a call by its name (below), and `await` of a future or task itself. Seen as a deadline is an
argument for it, an `asyncio.timeout(...)` around it in the same function, or, for a gathering of tasks, their
`cancel()` before it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MARK = "# no deadline: "
# How many positional arguments such a call has without a deadline.
WAITS = {
    **dict.fromkeys(
        ("wait", "join", "communicate", "acquire", "result", "get", "poll", "accept", "drain"), 0
    ),
    **dict.fromkeys(("wait_for", "waitpid", "waitid"), 1),
    **dict.fromkeys(("select",), 3),
}
# Whatever their arguments: there is none for a deadline.
NEVER = frozenset(
    ("gather", "waitpid", "waitid", "recv", "recv_into", "recvmsg", "recv_fds", "open_connection")
)
NEVER |= {"open_unix_connection", "readexactly", "readuntil", "sock_recv", "sock_connect", "sock_sendall"}
# Of asyncio, where the first argument is what is waited for.
OF_ASYNCIO = {"wait": 99, "wait_for": 1, "timeout": 0}
DEADLINES = frozenset(("timeout", "timeout_s", "deadline_s", "seconds"))
# They have the names, and wait for nobody.
NO_WAITS = ("job_key.get", "select.poll", "feed.poll")


@dataclass(frozen=True)
class Wait:
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


class Finder(ast.NodeVisitor):
    """Collects the waits of one module that have no deadline in sight."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.lines, self.found = path, source.splitlines(), []  # type: ignore[var-annotated]
        self._bounded = [False]
        self._cancels = [False]

    def visit_function(self, node: ast.AST) -> None:
        self._bounded.append(False)
        self._cancels.append(False)
        self.generic_visit(node)
        self._cancels.pop()
        self._bounded.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_function

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        timeouts = [call for call in calls if _dotted(call.func) in ("asyncio.timeout", "asyncio.timeout_at")]
        bounds = any(not (isinstance(a, ast.Constant) and a.value is None) for c in timeouts for a in c.args)
        before, self._bounded[-1] = self._bounded[-1], self._bounded[-1] or bounds
        self.generic_visit(node)
        self._bounded[-1] = before

    def visit_Await(self, node: ast.Await) -> None:
        if isinstance(node.value, ast.Name | ast.Attribute):
            self._add(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _dotted(node.func).rpartition(".")[2]
        if name == "cancel":
            self._cancels[-1] = True
        elif self._waits(node, name):
            self._add(node)
        if name in ("create_task", "gather"):
            # What a task waits for is bounded where the task is waited for.
            node = ast.Call(node.func, [a for a in node.args if not isinstance(a, ast.Call)], node.keywords)
        self.generic_visit(node)

    def _waits(self, node: ast.Call, name: str) -> bool:
        dotted = _dotted(node.func)
        if "." not in dotted or dotted.endswith(NO_WAITS):
            return False
        if name == "result" and "pytorch_hooks" not in self.path.parts:
            return False  # asyncio's raises where there is none yet
        if name == "select" and dotted != "select.select":
            return False
        if name == "gather":
            return not self._cancels[-1]
        if name in ("waitpid", "waitid"):
            return "WNOHANG" not in ast.unparse(node)
        if "MSG_DONTWAIT" in ast.unparse(node):
            return False
        if name in NEVER:
            return True
        if name not in WAITS or any(keyword.arg in DEADLINES for keyword in node.keywords):
            return False
        if dotted == "asyncio.wait" and self._cancels[-1]:
            return False
        most = OF_ASYNCIO[name] if dotted.startswith("asyncio.") else WAITS[name]
        given = [a for a in node.args if not (isinstance(a, ast.Constant) and a.value is None)]
        return len(given) <= most

    def _add(self, node: ast.Call | ast.Await) -> None:
        last = node.end_lineno or node.lineno
        around = self.lines[max(0, node.lineno - 2) : last + 1]
        before, inside = around[:1], self.lines[node.lineno - 1 : last]
        marked = any(MARK in line for line in inside) or any(line.strip().startswith(MARK) for line in before)
        if not marked and not self._bounded[-1]:
            self.found.append(Wait(self.path, node.lineno, self.lines[node.lineno - 1].strip()))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def waits(path: Path, source: str) -> list[Wait]:
    finder = Finder(path, source)
    finder.visit(ast.parse(source))
    unique = {(wait.line, wait.text): wait for wait in finder.found}
    return list(unique.values())


def modules() -> Iterator[Path]:
    for folder in ("daemon", "pytorch_hooks", "slurm_ext"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_every_wait_has_a_deadline_or_says_why_not() -> None:
    paths = list(modules())
    assert len(paths) > 200
    found = [w for path in paths for w in waits(path.relative_to(ROOT), path.read_text())]
    assert not found, "waits without a deadline:\n" + "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x.wait()", 1),
        ("x.wait(3)", 0),
        ("x.wait(None)", 1),
        ("x.wait(timeout=3)", 0),
        ("thread.join()", 1),
        ("', '.join(words)", 0),
        ("queue.get()", 1),
        ("table.get(key)", 0),
        ("future.result()", 0),
        ("x.wait()  # no deadline: its end is ours", 0),
        ("# no deadline: its end is ours\nx.wait()", 0),
        ("os.waitpid(pid, 0)", 1),
        ("os.waitpid(pid, os.WNOHANG)", 0),
        ("sock.recv(3)", 1),
        ("condition.wait_for(ready)", 1),
        ("condition.wait_for(ready, 3)", 0),
        ("async def f():\n await asyncio.wait(tasks)", 1),
        ("async def f():\n await asyncio.wait(tasks, timeout=3)", 0),
        ("async def f():\n await asyncio.gather(a, b)", 1),
        ("async def f():\n a.cancel()\n await asyncio.gather(a)", 0),
        ("async def f():\n await self.future", 1),
        ("async def f():\n async with asyncio.timeout(3):\n  await self.future", 0),
        ("async def f():\n async with asyncio.timeout(None):\n  await self.future", 1),
        ("async def f():\n async with asyncio.timeout(3):\n  def g():\n   x.wait()", 1),
        ("async def f():\n await event.wait()", 1),
    ],
)
def test_what_is_seen(source: str, count: int) -> None:
    assert len(waits(Path("x.py"), source)) == count
