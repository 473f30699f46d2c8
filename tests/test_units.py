"""Text for sizes, durations, booleans and numbers: read exactly, or refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkvault.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    approximate_size,
    format_size,
    parse_bool,
    parse_duration,
    parse_int,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("8GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("8Gi", 8 * GIB),
        ("500MB", 500_000_000),
        ("1.5 TiB", 3 * TIB // 2),
        (" 2 KiB ", 2 * KIB),
        ("0.5MiB", MIB // 2),
        ("2kB", 2000),
        ("3TB", 3 * 10**12),
        ("1GB", 10**9),
        ("1.1GiB", 1181116006),
    ],
)
def test_a_size_is_read_exactly(text, num_bytes):
    """Powers of ten and of two are told apart; what is left of a byte is cut off."""
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 G", "8G", "8T", "1,5GiB", "1e9", "+1", ".5GiB", "5.GiB", "8GiBs", "٣GiB", "0x10"]
)
def test_a_size_that_could_mean_two_things_is_refused(text):
    """A bare G, a comma, an exponent: refused, not guessed."""
    with pytest.raises(ValueError, match="expected bytes"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 60))
@example(5 * GIB)
def test_a_size_survives_being_written(num_bytes):
    """What `format_size` writes, `parse_size` reads back."""
    assert parse_size(format_size(num_bytes)) == num_bytes


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


@given(
    st.integers(min_value=0, max_value=10**6),
    st.text("0123456789", min_size=1, max_size=9),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", " ", "\t"]),
)
def test_a_fraction_of_a_unit_is_exact(whole, digits, unit, gap):
    """Sizes are computed in whole numbers: no rounding of floats, ever."""
    exact = Fraction(f"{whole}.{digits}") * UNITS[unit]
    assert parse_size(f"{whole}.{digits}{gap}{unit}") == exact.numerator // exact.denominator


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text):
    """No text makes the reader fail in another way, or gives a negative size."""
    try:
        num_bytes = parse_size(text)
    except ValueError:
        return
    assert num_bytes >= 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * GIB, "5.0 GiB"), (3 * TIB // 2, "1.5 TiB")],
)
def test_a_size_is_shown_with_one_decimal(num_bytes, text):
    """Readers get a short size."""
    assert approximate_size(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 10),
        ("2.5", 2.5),
        ("10s", 10),
        ("500ms", 0.5),
        ("250 us", 0.00025),
        ("2m", 120),
        ("2min", 120),
        ("1h", 3600),
    ],
)
def test_a_duration_is_read_with_its_unit(text, seconds):
    """Durations are seconds unless a unit says otherwise."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "1d", "1m30s", "-1s", "1e3", "inf", "nan"])
def test_a_duration_that_cannot_be_read_is_refused(text):
    """An unknown unit is an error, not seconds."""
    with pytest.raises(ValueError, match="expected seconds"):
        parse_duration(text)


DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


@given(st.integers(min_value=0, max_value=10**9), st.sampled_from(sorted(DURATION_UNITS)))
def test_a_whole_duration_is_its_number_times_its_unit(number, unit):
    """Number and unit are read independently of each other."""
    assert parse_duration(f"{number}{unit}") == pytest.approx(number * DURATION_UNITS[unit])


@given(st.floats(min_value=0.001, max_value=1000))
def test_a_number_of_seconds_may_be_written_as_text(seconds):
    """A number and its decimal text are the same duration."""
    assert parse_duration(f"{seconds:.9f}") == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize("word", ["true", "True", "YES", " on ", "1", True, 1])
def test_words_for_true(word):
    """Words that people write for true are true."""
    assert parse_bool(word) is True


@pytest.mark.parametrize("word", ["false", "False", "NO", " off ", "0", False, 0])
def test_words_for_false(word):
    """The text "false" is False, as are the other words for it."""
    assert parse_bool(word) is False


@pytest.mark.parametrize("word", ["", "none", "t", "2", "disabled", None, 1.0, []])
def test_anything_else_is_no_boolean(word):
    """Not every text that is not empty is true."""
    with pytest.raises(ValueError, match="expected one of true"):
        parse_bool(word)


@given(st.integers(min_value=-(10**18) + 1, max_value=10**18 - 1))
def test_a_whole_number_is_read_back(number):
    """Digits with a sign are a number."""
    assert parse_int(str(number)) == number


@pytest.mark.parametrize("text", ["", "1.0", "1_000", "0x10", "1e3", "٣", "1" * 5000])
def test_other_text_is_no_whole_number(text):
    """What Python would also take for an int is not taken."""
    with pytest.raises(ValueError, match="expected a whole number"):
        parse_int(text)
