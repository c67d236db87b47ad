"""Runs of ours as a tracking store has them, for `comparison.py`. Only this and `mlflow_run.py` import MLflow.

Reads only. A store is never made here: a database file that is not there is for the caller to refuse.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterator, Sequence

from mlflow.entities import Metric, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from orchestrator.tracking.comparison import RunRecord
from orchestrator.tracking.mlflow_environment import in_words
from orchestrator.tracking.mlflow_run import TOKEN_TAG

_OURS = f"tags.`{TOKEN_TAG}` LIKE '%'"
_NEWEST_FIRST = ["attributes.start_time DESC"]
_PER_PAGE = 100
_RUN_ID = re.compile(r"[0-9a-f]{6,32}")
_WILD = re.compile(r"[*?\[]")


class StoreError(Exception):
    """The store does not answer, or not as one of MLflow's version does."""


class Store:
    """The runs of a tracking store. Making one connects to it; every method may raise StoreError."""

    def __init__(self, uri: str, experiment: str | None = None) -> None:
        """`experiment` leaves out all others."""
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.search_experiments()
        except Exception as error:  # the stores behind MLflow raise errors of their own libraries
            raise StoreError(in_words(error)) from error
        self.experiments = [item.name for item in found]
        """Names of all."""
        self._ids = [item.experiment_id for item in found if experiment in (None, item.name)]

    def newest(self, count: int) -> list[RunRecord]:
        """The runs of ours that began last."""
        return self._records(self._search(_OURS, count))

    def matching(self, word: str) -> list[RunRecord]:
        """Runs of ours of this name, of a name that matches a pattern (`*`, `?`), or whose id begins so."""
        if "'" in word:
            return []
        if _WILD.search(word):
            like = re.sub(r"[*?]|\[.*?\]", "%", word)
            named = self._search(f"{_OURS} AND attributes.run_name LIKE '{like}'", None)
            return self._records([run for run in named if fnmatch.fnmatchcase(run.info.run_name, word)])
        found = self._search(f"{_OURS} AND attributes.run_name = '{word}'", None)
        if not found and _RUN_ID.fullmatch(word):
            found = [run for run in self._search(_OURS, None) if run.info.run_id.startswith(word)]
        return self._records(found)

    def names(self) -> list[str]:
        """Names of all runs of ours."""
        return sorted({run.info.run_name for run in self._search(_OURS, None)})

    def losses(self, run_id: str) -> list[tuple[int, float]]:
        """(step, training loss) in order."""
        return [(point.step, point.value) for point in self._history(run_id, "loss")]

    def _search(self, condition: str, count: int | None) -> list[Run]:
        if not self._ids:
            return []
        return list(self._pages(condition, count))

    def _pages(self, condition: str, count: int | None) -> Iterator[Run]:
        token, left = None, count
        while left is None or left > 0:
            size = _PER_PAGE if left is None else min(left, _PER_PAGE)
            try:
                page = self._client.search_runs(
                    self._ids, condition, max_results=size, order_by=_NEWEST_FIRST, page_token=token
                )
            except Exception as error:
                raise StoreError(in_words(error)) from error
            yield from page
            left = None if left is None else left - len(page)
            token = page.token
            if not token:
                return

    def _records(self, runs: Sequence[Run]) -> list[RunRecord]:
        return [self._record(run) for run in runs]

    def _record(self, run: Run) -> RunRecord:
        tags = dict(run.data.tags)
        steps = tags.get("orchestrator.steps", "")
        if run.info.status == "RUNNING" or not steps.isdecimal():  # said at the end only
            history = self._history(run.info.run_id, "loss")
            steps = str(history[-1].step) if history else ""
        return RunRecord(
            run_id=run.info.run_id,
            name=run.info.run_name or run.info.run_id,
            status=run.info.status,
            started_ms=run.info.start_time or 0,
            steps=int(steps) if steps.isdecimal() else None,
            parameters=dict(run.data.params),
            metrics=dict(run.data.metrics),
            tags=tags,
        )

    def _history(self, run_id: str, key: str) -> Sequence[Metric]:
        try:
            return sorted(self._client.get_metric_history(run_id, key), key=lambda point: (point.step, point.timestamp))
        except MlflowException as error:
            raise StoreError(in_words(error)) from error
