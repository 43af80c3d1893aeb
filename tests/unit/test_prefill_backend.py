"""The choice of a prompt attention kernel at start, with plain functions for kernels and given times."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest
import torch

from helios.errors import StartupError
from helios.kernels.prefill_attention import default_config, paged_prefill_reference
from helios.runtime import prefill_backend
from helios.runtime.prefill_backend import (
    CLASSES,
    Candidate,
    Choice,
    PrefillAttention,
    PrefillBackend,
    Problem,
    candidates,
    choose_prefill,
    fa3_candidate,
    require,
    triton_candidate,
)

Choose = Callable[..., PrefillBackend]
# The classes' own lengths, timed on problems of a moment.
SMALL = tuple((most, 40 + index, 20 * index) for index, (most, _, _) in enumerate(CLASSES))


def right(*arguments: torch.Tensor | int) -> torch.Tensor:
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    return paged_prefill_reference(*tensors)


def wrong(*arguments: torch.Tensor | int) -> torch.Tensor:
    return right(*arguments) * 1.1


def silent(*arguments: torch.Tensor | int) -> torch.Tensor:
    return torch.full_like(right(*arguments), torch.nan)


def broken(*_: torch.Tensor | int) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory\nmore lines")


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """``choose(name=(function, milliseconds), ...)`` with fa2 taking 10 ms."""

    def run(
        choice: Choice = "auto", budget_s: float = 60, **named: tuple[PrefillAttention, float]
    ) -> PrefillBackend:
        times = {"fa2": 10.0} | {name: ms for name, (_, ms) in named.items()}
        tried = [Candidate(name, function) for name, (function, _) in named.items()]
        monkeypatch.setattr(prefill_backend, "CLASSES", SMALL)
        monkeypatch.setattr(prefill_backend, "FA2", Candidate("fa2", right))
        monkeypatch.setattr(prefill_backend, "candidates", lambda *_: tried)
        monkeypatch.setattr(prefill_backend, "fa3_installed", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
        monkeypatch.setattr(Problem, "seconds", lambda _, candidate: times[candidate.name] / 1e3)
        return choose_prefill(
            choice, torch.device("cpu"), torch.float32, heads=2, kv_heads=1, head_dim=16, budget_s=budget_s
        )

    return run


def names(backend: PrefillBackend) -> set[str]:
    return {backend.choose(tokens).name for tokens in (1, 256, 257, 1024, 4096, 100_000)}


def test_fastest_right_candidate_wins(choose: Choose) -> None:
    assert names(choose(slow=(right, 20), quick=(right, 5), quicker=(right, 4))) == {"quicker"}
    assert names(choose(slow=(right, 20))) == {"fa2"}


@pytest.mark.parametrize("sm90", [False, True])
@pytest.mark.parametrize("fa3", [False, True])
def test_tails_are_tried_where_tiles_fill_the_card(
    sm90: bool, fa3: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one configuration with and without, under names that tell them apart; short calls start sooner. Where
    the kernel for SM90 is tried, long calls leave out the form without a tail, which never wins there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(prefill_backend, "kernels_available", lambda _: True)
    monkeypatch.setattr(prefill_backend, "sm90_kernels", lambda _: sm90)
    monkeypatch.setattr(prefill_backend, "fa3_installed", lambda: fa3)
    for most, _, _ in CLASSES:
        found = [one.name for one in candidates("auto", torch.device("cuda"), most)]
        assert (found[0] == "fa3") is fa3
        found = found[fa3:]
        plain = triton_candidate(default_config(most)).name
        if sm90:
            assert found == ["triton sm90", f"{plain} tail" if most > 512 else plain]
        else:
            assert found == [plain, *([f"{plain} tail"] if most > 512 else [])]


def test_a_name_is_judged_in_each_class(choose: Choose) -> None:
    """A kernel that is wrong for some lengths only is left out for those only."""

    def sometimes(*arguments: torch.Tensor | int) -> torch.Tensor:
        q = arguments[0]
        assert isinstance(q, torch.Tensor)
        return (right if q.shape[0] == SMALL[1][1] else wrong)(*arguments)

    backend = choose(sometimes=(sometimes, 1))
    assert [choice.name for choice in backend.choices] == ["fa2", "sometimes"] + ["fa2"] * (len(SMALL) - 2)


def test_a_gain_within_the_noise_changes_nothing(choose: Choose) -> None:
    """The tried kernel is left for a clear gain only."""
    assert names(choose(even=(right, 9.9))) == {"fa2"}


@pytest.mark.parametrize("function", [wrong, silent, broken])
def test_wrong_or_failing_candidates_are_never_chosen(
    choose: Choose, function: PrefillAttention, caplog: pytest.LogCaptureFixture
) -> None:
    """Speed does not excuse a wrong answer, NaN included, and a kernel that cannot be compiled ends nothing."""
    caplog.set_level(logging.INFO, "helios.startup")
    assert names(choose(bad=(function, 1), good=(right, 5))) == {"good"}
    assert "leaves out bad" in caplog.text


def test_nothing_is_tried_when_time_is_up(choose: Choose) -> None:
    """A slow compiler must not hold up the start."""
    assert names(choose(budget_s=0, quick=(right, 1))) == {"fa2"}
    assert names(choose(budget_s=1e-9, quick=(right, 1))) == {"fa2"}


def test_a_forced_choice_is_kept_even_if_slow(choose: Choose) -> None:
    assert names(choose("triton", kernel=(right, 50), other=(right, 60))) == {"kernel"}
    assert names(choose("triton", budget_s=0, kernel=(right, 50))) == {"kernel"}
    assert names(choose("fa2", kernel=(right, 1))) == {"fa2"}


def test_a_forced_choice_that_cannot_run_says_why(choose: Choose) -> None:
    with pytest.raises(StartupError, match="cannot run on a card: kernel: RuntimeError: out of resource"):
        choose("triton", kernel=(broken, 1))
    with pytest.raises(StartupError, match="not supported"):
        choose("fa3")


def test_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_backend, "fa3_installed", lambda: False)
    with pytest.raises(StartupError, match="uv sync --extra fa3"):
        require("fa3")
    require("auto")


def test_a_broken_package_is_left_out(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library built for another torch fails in its import: the start goes on with what works."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert names(choose(fa3=(fa3_candidate().run, 1), good=(right, 5))) == {"good"}


def test_the_log_names_choices_and_times(choose: Choose, caplog: pytest.LogCaptureFixture) -> None:
    """One line from which a slow start or a slow prompt can be explained."""
    caplog.set_level(logging.INFO, "helios.startup")
    choose(quick=(right, 5))
    (line,) = caplog.messages
    assert line.count("quick") == 2 * len(CLASSES)
    assert "41 after 20, us: fa2 10000, quick 5000" in line


def test_a_call_goes_to_the_choice_of_its_length() -> None:
    marks = [float(index) for index in range(len(CLASSES))]
    chosen = [Candidate(f"c{mark}", lambda q, *_, mark=mark: torch.full_like(q, mark)) for mark in marks]
    backend = PrefillBackend(chosen)
    none = torch.zeros(0)
    for (most, _, _), mark in zip(CLASSES, marks, strict=True):
        q = torch.zeros(min(most, 4000), 1, 1)
        out = backend(q, none, none, none, none, none, 1, 1)
        assert out.unique().tolist() == [mark]
