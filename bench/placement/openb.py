"""Reads the public openb trace (Alibaba cluster-trace-gpu-v2023), the arrival orders and the published results."""

from __future__ import annotations

import csv
import gzip
import io
from collections import defaultdict
from pathlib import Path

import numpy as np

from .fleet import CARD_MILLI, IntArray, Node, Shape

MIB = 1024 * 1024
SEEDS = tuple(range(42, 52))
FIGURES = ("alloc100", "alloc130", "frag100", "frag130")


def openb_folder(traces: Path) -> Path:
    """The folder with the openb files: TRACES itself or its `openb`."""
    for folder in (traces, traces / "openb"):
        if (folder / "openb_node_list_gpu_node.csv").is_file():
            return folder
    raise FileNotFoundError(f"no openb_node_list_gpu_node.csv in {traces} or {traces / 'openb'}")


def _rows(path: Path) -> list[dict[str, str]]:
    packed = path.with_name(path.name + ".gz")
    data = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
    return list(csv.DictReader(io.StringIO(data.decode())))


def read_nodes(folder: Path) -> list[Node]:
    """The GPU nodes, by name."""
    nodes = [
        Node(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]) * MIB, int(row["gpu"]), row["model"])
        for row in _rows(folder / "openb_node_list_gpu_node.csv")
    ]
    return sorted(nodes, key=lambda node: node.name)


def read_pods(folder: Path, name: str) -> list[Shape]:
    """The shapes of a pod list, in the order of the pods' names."""
    rows = sorted(_rows(folder / f"openb_pod_list_{name}.csv"), key=lambda row: row["name"])
    shapes = []
    for row in rows:
        cards = int(row["num_gpu"])
        models = tuple(model for model in (row.get("gpu_spec") or "").split("|") if model)
        milli = int(row["gpu_milli"] or 0) if cards else 0
        if cards > 1 and milli != CARD_MILLI:
            raise ValueError(f"{row['name']} asks for {cards} parts of cards; a share is of one card")
        shapes.append(Shape(int(row["cpu_milli"]), int(row["memory_mib"]) * MIB, cards, milli, models))
    return shapes


def read_arrival(folder: Path, name: str, seed: int) -> tuple[IntArray, IntArray]:
    """(row numbers of the pods in arrival order, rank of each node in ties)."""
    with np.load(folder / f"arrival_openb_pod_list_{name}.npz") as orders:
        return orders[f"pods_{seed}"].astype(np.int64), orders[f"nodes_{seed}"].astype(np.int64)


def read_published(folder: Path) -> dict[tuple[str, str], dict[int, tuple[float, ...]]]:
    """(list, policy) -> seed -> the four figures, in percent."""
    published: dict[tuple[str, str], dict[int, tuple[float, ...]]] = defaultdict(dict)
    for row in _rows(folder / "expected_alloc_frag.csv"):
        key = row["workload"].removeprefix("openb_pod_list_"), row["sc_policy"].split("-", 1)[1]
        published[key][int(row["seed"])] = tuple(float(row[figure]) for figure in FIGURES)
    return dict(published)


def lists_available(folder: Path) -> list[str]:
    """Every pod list that has arrival orders, the default first."""
    names = sorted(
        path.name.removeprefix("arrival_openb_pod_list_").removesuffix(".npz")
        for path in folder.glob("arrival_openb_pod_list_*.npz")
    )
    return [*(name for name in names if name == "default"), *(name for name in names if name != "default")]
