"""What the source of an environment says about imports, network and files, without running it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.files import InputError, read_text


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NETWORK_MODULES = _words(
    """socket ssl http urllib.request ftplib smtplib poplib imaplib telnetlib xmlrpc socketserver asyncio.streams
    requests httpx aiohttp websockets urllib3 openai"""
)
PROCESS_MODULES = _words("subprocess multiprocessing pty ctypes")
# Bare names, attributes of anything, attributes of `os`: an environment may have a method `open` or `mkdir` of its own.
FILE_NAMES = _words("open exec eval")
FILE_ATTRIBUTES = _words("read_text write_text read_bytes write_bytes rmtree")
OS_ATTRIBUTES = _words("open system popen remove unlink mkdir makedirs rename replace fork execv execve")
TRAINER_PACKAGES = ("train", "pipeline", "moe_gate", "torch", "transformers", "vllm")


@dataclasses.dataclass(frozen=True)
class Found:
    """One thing in the source, with its place."""

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} ({self.place})"


@dataclasses.dataclass(frozen=True)
class SourceFacts:
    imports: tuple[Found, ...]
    calls: tuple[Found, ...]

    def imports_of(self, packages: Sequence[str]) -> list[Found]:
        """Imports of any of ``packages`` or of a module inside one."""
        return [f for f in self.imports if any(f.what == p or f.what.startswith(f"{p}.") for p in packages)]


def read_facts(files: Sequence[Path]) -> SourceFacts:
    """Imports and file calls of some Python files.

    Raises:
        InputError: a file is missing or does not parse.
    """
    imports: list[Found] = []
    calls: list[Found] = []
    for file in files:
        try:
            tree = ast.parse(read_text(file, "environment file"))
        except SyntaxError as error:
            raise InputError(f"environment file {file}: line {error.lineno}: {error.msg}") from None
        for node in ast.walk(tree):
            place = f"{file.name}:{getattr(node, 'lineno', 0)}"
            imports += [Found(name, place) for name in _imported(node)]
            if isinstance(node, ast.Call) and _touches_files(node.func):
                calls.append(Found(f"{ast.unparse(node.func)[:60]}()", place))
    return SourceFacts(tuple(imports), tuple(calls))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def _touches_files(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in FILE_NAMES
    if not isinstance(function, ast.Attribute):
        return False
    of_os = isinstance(function.value, ast.Name) and function.value.id in ("os", "io")
    return function.attr in FILE_ATTRIBUTES or (of_os and function.attr in OS_ATTRIBUTES)


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
