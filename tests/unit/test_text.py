from __future__ import annotations

import math

import pytest

from nbddp.kernel.text import bytes_text, clock_text, count_text, rate_text, seconds_text, share_text, short_id, value_text


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (0.23144, "0.2314"),
        (1.0, "1"),
        (-2.7712, "-2.771"),
        (999.94, "999.9"),
        (999.96, "1,000"),
        (1234.5678, "1,235"),
        (9999.9, "10,000"),
        (12345.0, "12,345"),
        (-12345.0, "-12,345"),
        (45678.9, "45,679"),
        (3e9, "3e+09"),
        (1.234e-5, "1.23e-05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_values(value: float, text: str) -> None:
    assert value_text(value) == text


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.1 * 2**30, "1.1 GiB"),
        (139 * 2**30, "139 GiB"),
        (1023.9 * 2**20, "1.0 GiB"),
        (9.97 * 2**20, "10 MiB"),
        (5000 * 2**40, "5,000 TiB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 µs"),
        (85e-6, "85 µs"),
        (0.9996e-3, "1.0 ms"),
        (3.21e-3, "3.2 ms"),
        (0.1234, "123 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (59.99, "1:00"),
        (65, "1:05"),
        (math.nan, "–"),
    ],
)
def test_short_durations(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (None, "–"),
        (0.4, "0:00"),
        (7, "0:07"),
        (65, "1:05"),
        (3599.6, "1:00:00"),
        (7384, "2:03:04"),
        (3 * 86400 + 7380, "3 d 02:03"),
        (math.inf, "–"),
        (-3, "0:00"),
    ],
)
def test_durations_on_the_clock(seconds: float | None, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    "rate, text", [(0, "0.00"), (0.00321, "0.00321"), (4.213, "4.21"), (83.46, "83.5"), (128.4, "128"), (12345, "12,300"), (math.inf, "–")]
)
def test_rates(rate: float, text: str) -> None:
    assert rate_text(rate) == text


def test_counts_shares_and_ids() -> None:
    assert (count_text(1234567), count_text(math.nan)) == ("1,234,567", "–")
    assert [share_text(part, 200) for part in (0, 0.5, 84, 200)] == ["0 %", "<1 %", "42 %", "100 %"]
    assert share_text(1, 0) == "0 %"
    assert short_id("20261129-130501-digits-k3f9") == "digits-k3f9"
