"""Values between tests and candidate: round trips, what is refused, and both sides talking in one process."""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
import os
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.swe_candidate import Candidate
from pipeline.swe_codec import Pipe, decode, encode
from pipeline.swe_tests import Client, ModuleUnderTest, Remote, _write_back

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
        | st.frozensets(st.text(max_size=2), max_size=3)
    ),
    max_leaves=8,
)


def refuse(value: Any) -> Any:
    raise TypeError(f"no reference for {value!r}")


def through(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, refuse))), refuse)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    back = through(value)
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict([("b", 1), ("a", 2)]),
        Counter("aab"),
        deque([1, 2]),
        bytearray(b"x"),
        float("inf"),
        -0.0,
        10**60,
        "\ud800",
        datetime.timedelta(days=-1, microseconds=3),
        decimal.Decimal("1.10"),
        fractions.Fraction(-1, 3),
        int,
        KeyError,
        Ellipsis,
        NotImplemented,
        {(1, 2): [{3}]},
    ],
)
def test_special_values(value: Any) -> None:
    back = through(value)
    assert back == value and type(back) is type(value) and repr(back) == repr(value)


def test_not_a_number() -> None:
    back = through(float("nan"))
    assert back != back


def test_default_dictionaries_lose_their_factory() -> None:
    back = through(defaultdict(list, {"a": [1]}))
    assert back == {"a": [1]} and back.default_factory is None


@pytest.mark.parametrize("data", [["builtin", "eval"], ["builtin", "__import__"], ["builtin", "open"]])
def test_no_function_arrives_by_name(data: Any) -> None:
    with pytest.raises(KeyError):
        decode(data, refuse)


@pytest.mark.parametrize("data", [{"a": 1}, 1.5, ["unknown", 1]])
def test_what_is_no_encoding_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(data, refuse)


def test_a_pipe_that_ends_is_an_error() -> None:
    read, write = os.pipe()
    pipe = Pipe(os.fdopen(read, "rb"), os.fdopen(os.dup(write), "wb"))
    pipe.send({"a": [1]})
    assert pipe.receive() == {"a": [1]}
    os.close(write)
    pipe._sink.close()
    with pytest.raises(ConnectionError):
        pipe.receive()


# --------------------------------------------------------------------------- both sides


Start = Callable[[str], ModuleUnderTest]


@pytest.fixture
def start() -> Iterator[Start]:
    """A module behind a pipe, its candidate in a thread of this process."""
    ends: list[Any] = []

    def begin(code: str) -> ModuleUnderTest:
        module = types.ModuleType("thing")
        exec(code, vars(module))
        (a, b), (c, d) = os.pipe(), os.pipe()
        candidate = Candidate(Pipe(os.fdopen(a, "rb"), os.fdopen(d, "wb")), module)

        def serve() -> None:
            with pytest.raises((ConnectionError, OSError)):
                candidate.serve()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        pipe = Pipe(os.fdopen(c, "rb"), os.fdopen(b, "wb"))
        ends.append((pipe, thread))
        return ModuleUnderTest("thing", "thing.py", Remote(Client(pipe), 0, "module"))

    yield begin
    for pipe, thread in ends:
        pipe._sink.close()
        thread.join(5)
        assert not thread.is_alive()


def test_functions_and_constants(start: Start) -> None:
    thing = start("A = [1, {2: (3,)}]\ndef add(a, b=1, *c, **d):\n    return a + b + sum(c) + sum(d.values())\n")
    assert thing.A == [1, {2: (3,)}]
    assert thing.add(1) == 2 and thing.add(1, 2, 3, x=4) == 10
    thing.A = 5
    assert thing.A == 5
    del thing.A
    with pytest.raises(AttributeError):
        _ = thing.A


def test_objects_keep_their_identity(start: Start) -> None:
    thing = start("class T:\n    pass\nONE = T()\ndef same(x):\n    return x is ONE\ndef get():\n    return ONE\n")
    assert thing.get() is thing.ONE and thing.same(thing.ONE) and not thing.same(thing.T())
    thing.ONE.name = "x"
    assert thing.get().name == "x"
    del thing.ONE.name
    assert not hasattr(thing.ONE, "name")


OPERATORS = """
class V:
    def __init__(self, x): self.x = x
    def __add__(self, o): return V(self.x + (o.x if isinstance(o, V) else o))
    __radd__ = __add__
    def __neg__(self): return V(-self.x)
    def __lt__(self, o): return self.x < o.x
    def __eq__(self, o): return isinstance(o, V) and o.x == self.x
    def __hash__(self): return hash(self.x)
    def __getitem__(self, i): return [self.x, i]
    def __setitem__(self, i, v): self.x = (i, v)
    def __contains__(self, i): return i == self.x
    def __iter__(self): return iter([self.x] * 2)
    def __len__(self): return 7
    def __bool__(self): return self.x != 0
    def __int__(self): return self.x
    def __call__(self, y): return self.x * y
    def __repr__(self): return f"V({self.x})"
"""


def test_operators(start: Start) -> None:
    V = start(OPERATORS).V
    a, b = V(2), V(3)
    assert (a + b).x == 5 and (a + 1).x == 3 and (1 + a).x == 3 and (-a).x == -2
    assert a < b and a == V(2) and a != b and len({a, V(2)}) == 1
    assert a[9] == [2, 9] and 2 in a and 5 not in a and list(a) == [2, 2] and len(a) == 7
    assert bool(a) and not bool(V(0)) and int(a) == 2 and a(4) == 8 and repr(a) == "V(2)"
    a[1] = 2
    assert a.x == (1, 2)


def test_claims_of_equality_do_not_reach_plain_values(start: Start) -> None:
    thing = start(
        "class Yes:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
        "class YesInt(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
    )
    for claimed, plain in ((thing.Yes(), 5), (thing.Yes(), [1]), (thing.YesInt(3), 4)):
        assert (claimed == plain, plain == claimed, claimed != plain) == (False, False, True)
    assert thing.Yes() == thing.Yes(), "between two objects of the module, the module decides"
    assert thing.YesInt(3) == 3


def test_exceptions_of_the_module(start: Start) -> None:
    thing = start(
        "class Base(Exception):\n    pass\nclass Sub(Base, KeyError):\n    def __init__(self, m, n):\n"
        "        super().__init__(m)\n        self.n = n\n    def __str__(self):\n        return 'told'\n"
        "def fail():\n    raise Sub('m', 7)\ndef uni():\n    b'\\xff'.decode()\n"
    )
    with pytest.raises(thing.Base) as caught:
        thing.fail()
    assert isinstance(caught.value, KeyError) and str(caught.value) == "told" and caught.value.n == 7
    with pytest.raises(thing.Sub):
        thing.fail()
    with pytest.raises(UnicodeDecodeError, match="utf-8"):
        thing.uni()
    assert issubclass(thing.Sub, thing.Base)


def test_callbacks_may_call_the_module_again(start: Start) -> None:
    thing = start(
        "def twice(f, x):\n    return f(f(x))\ndef inc(x):\n    return x + 1\n"
        "KEPT = []\ndef keep(f):\n    KEPT.append(f)\n    return f\n"
    )
    assert thing.twice(lambda v: thing.inc(v) * 10, 1) == 210
    mine = len
    assert thing.keep(mine) is mine, "a function of the tests comes back as itself"


def test_only_functions_and_plain_values_are_handed_over(start: Start) -> None:
    thing = start("def f(x):\n    return x\n")

    class Mine:
        pass

    with pytest.raises(TypeError, match="cannot be passed"):
        thing.f(Mine())


def test_an_error_in_a_callback_reaches_the_module(start: Start) -> None:
    thing = start("def safe(f):\n    try:\n        f()\n    except ZeroDivisionError:\n        return 'caught'\n")
    assert thing.safe(lambda: 1 / 0) == "caught"


def test_changes_in_place_come_back(start: Start) -> None:
    thing = start("def change(a, b, c):\n    a.append(1)\n    b['k'] = 2\n    c.add(3)\n")
    a: list[int] = []
    b: dict[str, int] = {}
    c: set[int] = set()
    thing.change(a, b, c)
    assert (a, b, c) == ([1], {"k": 2}, {3})


def test_write_back_leaves_equal_values_alone() -> None:
    inner = [1]
    values = [inner]
    _write_back(values, [[1]])
    assert values[0] is inner
    _write_back(values, [[2]])
    assert values == [[2]]
