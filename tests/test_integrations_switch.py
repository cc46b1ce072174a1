"""The switch that all integrations share, thrown on a framework made for the test."""

from __future__ import annotations

import logging
import sys
import threading
import types
from importlib import metadata

import pytest

from maxsim.integrations import IntegrationError, calls, calls_left, reset_calls
from maxsim.integrations._switch import Seam, Switch, left_to_host, served


@pytest.fixture
def host(monkeypatch):
    """A framework of two functions, a method, a static and an inherited one; version 1.2."""

    def double(x):
        return 2 * x

    def triple(x, y=0):
        return 3 * x + y

    class Base:
        def inherited(self):
            return "base"

    class Model(Base):
        def method(self, x):
            return ("host", x)

        @staticmethod
        def static(x):
            return ("host", x)

    module = types.ModuleType("a_host")
    module.double, module.triple, module.Model, module.Base = double, triple, Model, Base
    monkeypatch.setitem(sys.modules, "a_host", module)
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.2" if name == "a-host" else version(name))
    reset_calls()
    return module


def seams():
    return [
        Seam("a_host", "double", lambda host, x: ("ours", host(x)), ("x",)),
        Seam("a_host", "Model.method", lambda host, self, x: ("ours", host(self, x)), ("self", "x")),
        Seam("a_host", "Model.static", lambda host, x: ("ours", host(x)), ("x",)),
        Seam("a_host", "Model.inherited", lambda host, self: ("ours", host(self))),
    ]


def state(host):
    return dict(vars(host)), dict(vars(host.Model)), dict(vars(host.Base))


def test_all_is_replaced_and_put_back(host, caplog):
    before = state(host)
    switch = Switch("a-host", ("1", "2"), seams())
    with caplog.at_level(logging.INFO, "maxsim.integrations"):
        switch.enable()
        assert switch.enabled
        model = host.Model()
        assert host.double(3) == ("ours", 6)
        assert model.method(3) == ("ours", ("host", 3))
        assert model.static(3) == host.Model.static(3) == ("ours", ("host", 3))
        assert model.inherited() == ("ours", "base") and host.Base().inherited() == "base"
        kept = host.double
        switch.disable()
    assert state(host) == before and not switch.enabled
    assert kept(3) == 6, "a reference that was kept serves as the host does"
    first, last = caplog.messages
    assert first.startswith("replaced in a-host 1.2: a_host.double, a_host.Model.method")
    assert last.startswith("put back in a-host")


def test_blocks_end_their_own_enable_only(host):
    before = state(host)
    switch = Switch("a-host", ("1", "2"), seams())
    with switch.enable(), switch.enable():
        assert switch.enabled
    assert state(host) == before
    outer = switch.enable()
    with switch.enable():
        pass
    assert switch.enabled, "the first enable() is still outstanding"
    with outer:  # the handle of an enable() may end it
        assert switch.enabled
    assert state(host) == before
    with pytest.raises(ZeroDivisionError), switch.enable():
        raise ZeroDivisionError
    assert state(host) == before
    for _ in range(3):
        switch.enable()
    switch.disable()
    switch.disable()
    assert state(host) == before
    with outer:
        assert switch.enabled
    assert state(host) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Seam("a_host", "missing", lambda host: 0), "missing"),
        (Seam("a_host.missing", "double", lambda host: 0), "a_host"),
        (Seam("a_host", "Model.missing", lambda host: 0), "missing"),
        (Seam("a_host", "triple", lambda host, x: 0, ("x",)), r"takes \(x, y\), expected \(x\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, Seam) else "",
)
def test_a_wrong_seam_is_refused_and_nothing_replaced(host, wrong, message):
    before = state(host)
    switch = Switch("a-host", ("1", "2"), [*seams(), wrong])
    with pytest.raises(IntegrationError, match=r"a-host 1\.2 is not as expected \(a-host from 1") as caught:
        switch.enable()
    with pytest.raises(IntegrationError, match=message):
        switch.check()
    assert str(wrong) in str(caught.value)
    assert state(host) == before and not switch.enabled


@pytest.mark.parametrize(("low", "high", "fits"), [("1.2.0", "2", True), ("1.3", "2", False), ("1", "1.2", False)])
def test_versions(host, low, high, fits):
    switch = Switch("a-host", (low, high), seams())
    if fits:
        assert switch.check() == "1.2"
        return
    with pytest.raises(IntegrationError, match=rf"for a-host from {low} up to, but without, {high}; installed is 1\.2"):
        switch.enable()


def test_missing_package():
    with pytest.raises(IntegrationError, match="no-such-package is not installed"):
        Switch("no-such-package", ("1", "2"), seams()).enable()


def test_a_failure_half_way_is_taken_back(host):
    class Stubborn(type):
        def __setattr__(cls, name, value):
            raise TypeError("cannot be set")

    host.Fixed = Stubborn("Fixed", (), {"method": lambda self: 0})
    before = state(host)
    switch = Switch("a-host", ("1", "2"), [*seams(), Seam("a_host", "Fixed.method", lambda host, self: 1)])
    with pytest.raises(TypeError, match="cannot be set"):
        switch.enable()
    assert state(host) == before and not switch.enabled


def test_what_others_replaced_meanwhile_is_left(host, caplog):
    switch = Switch("a-host", ("1", "2"), seams())
    switch.enable()
    ours = host.double

    def theirs(x):
        return ("theirs", ours(x))

    host.double = theirs
    switch.disable()
    assert host.double is theirs and host.double(2) == ("theirs", 4)
    assert "a_host.double was replaced by others" in caplog.text


def test_counters_and_reasons(caplog):
    reset_calls()
    for _ in range(3):
        served("a.f")
        left_to_host("a.f", "it is Monday")
    left_to_host("a.f", "it rains")
    assert calls() == {"a.f": 3}
    assert calls_left() == {"a.f: it is Monday": 3, "a.f: it rains": 1}
    assert caplog.messages == [
        "a.f served by the host, because it is Monday",
        "a.f served by the host, because it rains",
    ]
    reset_calls()
    assert calls() == calls_left() == {}


def test_threads(host):
    before = state(host)
    switch = Switch("a-host", ("1", "2"), seams())
    wrong = []

    def work():
        for _ in range(200):
            with switch.enable():
                if host.double(1) != ("ours", 2):
                    wrong.append(host.double(1))
                served("threads")

    reset_calls()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and calls() == {"threads": 800} and state(host) == before
    reset_calls()
