"""Tiers, and what CI may skip.

A test's tier is the folder it lies in. Tiers run from the cheap to the dear, and the summary at the end
counts each of them. With RIGBOOK_CI=1 a skip is a failure, unless its reason begins with one of
MAY_BE_SKIPPED: what no CI machine of this project has. A tier without a single passed test fails too.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

HERE = Path(__file__).parent
TIERS = ("unit", "contract", "simulation", "e2e", "acceptance")
# Tiers that must have run when the whole suite was asked for on CI.
TIERS_DUE = ("unit", "contract", "simulation", "e2e", "acceptance")
# Reasons for which a test may be skipped even there; a skip's reason must begin with one of them.
MAY_BE_SKIPPED = ("needs cgroup v2", "needs a real GPU")

ON_CI = os.environ.get("RIGBOOK_CI") == "1"


def tier_of(path: Path) -> str:
    try:
        return path.relative_to(HERE).parts[0]
    except ValueError:
        return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {tier: number for number, tier in enumerate(TIERS)}
    items.sort(key=lambda item: order.get(tier_of(item.path), len(TIERS)))


def refused(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why this skip does not pass on CI; "" when it does, or when it is none."""
    if not (ON_CI and report.skipped) or hasattr(report, "wasxfail"):
        return ""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    return "" if reason.startswith(MAY_BE_SKIPPED) else f"skipped on CI, where it must run: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    why = refused(report)
    if why:
        report.outcome, report.longrepr = "failed", why
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    why = refused(report)
    if why:
        report.outcome, report.longrepr = "failed", why
    return report


def counts(reporter: Any) -> dict[str, Counter[str]]:
    """Outcomes by tier."""
    tiers: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in reporter.stats.get(outcome, ()):
            path = reporter.config.rootpath / report.nodeid.partition("::")[0]
            tiers[tier_of(path)][outcome] += 1
    return tiers


def tiers_missing(config: pytest.Config) -> list[str]:
    """Tiers of which no test passed, when the whole suite was asked for on CI."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not (
        config.option.keyword or config.option.markexpr or config.option.collectonly
    )
    if not (ON_CI and whole):
        return []
    done = counts(config.pluginmanager.get_plugin("terminalreporter"))
    return [tier for tier in TIERS_DUE if not done[tier]["passed"]]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and tiers_missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    done = counts(terminalreporter)
    if not any(done.values()):
        return
    terminalreporter.section("tiers", sep="-")
    for tier in (*TIERS, ""):
        if done[tier]:
            told = ", ".join(f"{number} {outcome}" for outcome, number in done[tier].items())
            terminalreporter.line(f"{tier or 'elsewhere':12} {told}")
    for tier in tiers_missing(config):
        terminalreporter.line(f"{tier:12} did not run, and must on CI", red=True)
