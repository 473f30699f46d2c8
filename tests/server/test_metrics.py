"""What a scraper gets from a real server, by the rules of `promtool check metrics`, and by promtool if it is there."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qkvault.metrics import STORE_METRICS, UP
from qkvault.testing.transport_contract import find, save

TYPES = {"counter", "gauge", "histogram", "summary"}
OTHER_UNITS = set(
    "ms milliseconds microseconds nanoseconds minutes hours days kb mb gb kib mib gib kilobytes megabytes gigabytes "
    "bits percent".split()
)
BASE_UNITS = {"seconds", "bytes", "ratio"}


def problems_of(text):
    """What is wrong with a scrape, one line each."""
    for line, count in Counter(line.rpartition(" ")[0] for line in text.splitlines() if line[:1] != "#").items():
        if count > 1:
            yield f"{line}: told {count} times"
    for kind in ("HELP", "TYPE"):
        for name, count in Counter(re.findall(rf"^# {kind} (\S+)", text, re.MULTILINE)).items():
            if count > 1:
                yield f"{name}: {count} lines of {kind}"
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield from (f"{sample.name}: {why}" for why in problems_of_sample(family, sample))


def problems_of_sample(family, sample):
    """What is wrong with one sample."""
    words = sample.name.split("_")
    end, labels, meaning = words[-1], sample.labels, family.documentation
    rules = {
        "no name in lower case": not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", sample.name),
        f"the type {family.type}": family.type not in ("counter", "gauge"),
        "counters, and no others, end in _total": (end == "total") != (family.type == "counter"),
        f"the suffix {end} is for other types": end in ("count", "sum", "bucket", "info", "created"),
        "its type is in its name": set(words) & TYPES,
        "not in a base unit": set(words) & OTHER_UNITS,
        "its unit is not at its end": BASE_UNITS & set(words[: -2 if end == "total" else -1]),
        f"no sentence says what it is: {meaning!r}": not re.fullmatch(r"[A-Z0-9].{8,}\.", meaning),
        f"labels that are taken, or empty: {labels}": {"le", "quantile", "job", "instance"} & set(labels)
        or not all(labels.values()),
        f"the value {sample.value}": not math.isfinite(sample.value) or sample.value < 0,
    }
    return [why for why, is_broken in rules.items() if is_broken]


def test_all_that_a_server_exports_is_clean(start, connect, kit, tmp_path):
    """B335: units, suffixes, help and types, of the store and of the process, before and after it has worked."""
    flags = ("--disk", f"{tmp_path}/disk", "--disk-size", "64MiB", "--http", f"unix://{tmp_path}/h")
    server = start(*flags).wait_ready()
    http, client = kit.Http(f"unix://{tmp_path}/h"), connect(server.address)
    idle = http.ask("GET", "/metrics")[1]
    assert list(problems_of(idle)) == []
    save(client, "aabb")
    deadline = time.monotonic() + 30
    while client.status().num_jobs:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    client.clear(lower_tiers=False)
    client.release(client.wait(find(client, "aabbx"), 30.0, time.monotonic).lease_id)
    client.clear()
    busy = http.ask("GET", "/metrics")[1]
    assert list(problems_of(busy)) == []
    assert names_in(idle) == names_in(busy) >= {metric.name for metric in (UP, *STORE_METRICS)}
    assert {name for name in names_in(busy) if not name.startswith(("qkvault_store_", "process_"))} == set()
    if promtool := shutil.which("promtool"):
        done = subprocess.run([promtool, "check", "metrics"], input=busy, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def names_in(text):
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# HELP a_b Bees, all of them.\n# TYPE a_b counter\na_b_total 1\na_b_total 2\n", "told 2 times"),
        ("# HELP a_b Bees, all of them.\n# HELP a_b Bees.\n# TYPE a_b gauge\na_b 1\n", "2 lines of HELP"),
        ("# HELP a_b Bees, all of them.\n# TYPE a_b gauge\na_b_total 1\n", "counters, and no others"),
        ("# HELP a_b Bees, all of them.\n# TYPE a_b untyped\na_b 1\n", "the type unknown"),
        ("# HELP a_ms Time it took in all.\n# TYPE a_ms gauge\na_ms 1\n", "not in a base unit"),
        ("# HELP a_bytes_b Bees, all of them.\n# TYPE a_bytes_b gauge\na_bytes_b 1\n", "its unit is not at its end"),
        ("# HELP a_gauge Bees, all of them.\n# TYPE a_gauge gauge\na_gauge 1\n", "its type is in its name"),
        ("# HELP a_count Bees, all of them.\n# TYPE a_count gauge\na_count 1\n", "the suffix count"),
        ("# TYPE a_b gauge\na_b 1\n", "no sentence"),
        ("# HELP a_b Bees, all of them.\n# TYPE a_b gauge\na_b NaN\n", "the value nan"),
        ("# HELP aB Bees, all of them.\n# TYPE aB gauge\naB 1\n", "no name"),
        ('# HELP a_b Bees, all of them.\n# TYPE a_b gauge\na_b{job="x"} 1\n', "labels"),
    ],
)
def test_each_rule_is_one(text, why):
    assert why in "\n".join(problems_of(text))
