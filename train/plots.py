"""Plots as SVG text for the report pages: no script, no outside file, readable on light and dark.

Axes and letters take the page's own text colour (`currentColor`); the line colours are chosen to
stand out on white and on near-black.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#2f7ed8", "#e0682f", "#2a9d6f", "#b0489b", "#a8862b", "#5c6bc0", "#d1495b", "#4f8f8b")
# Stands for the page's text colour while matplotlib draws; replaced in the SVG.
_INK = "#010203"
_SIZE_INCHES = (5.0, 3.0)
MAX_POINTS = 400

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "legend.frameon": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a plot: values over steps; NaN values are left out."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]


def line_plot(
    name: str,
    curves: Sequence[Curve],
    *,
    ylabel: str,
    xlabel: str = "step",
    is_log: bool = False,
    has_markers: bool = False,
) -> str:
    """Return an SVG of curves, over optimiser steps unless `xlabel` says something else.

    A curve of more than 400 points is shown as the mean of equal runs of points, with the range
    between their extremes behind it.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _figure()
        for index, curve in enumerate(curves):
            _draw_curve(axes, curve, COLOURS[index % len(COLOURS)], has_markers)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        if is_log:
            axes.set_yscale("log")
        if len(curves) > 1:
            axes.legend(fontsize=8.5)
        return _svg(figure, name)


def position_plot(groups: Mapping[str, Mapping[str, float]]) -> str:
    """Return an SVG of bars, the share of blocks in which a drafted token was accepted.

    Args:
        groups: legend entry to {drafted token: share}; tokens keep their first order.
    """
    name = "acceptance by position"
    places = list(dict.fromkeys(place for heights in groups.values() for place in heights))
    width = 0.8 / max(1, len(groups))
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _figure()
        for index, (label, heights) in enumerate(groups.items()):
            offset = (index - (len(groups) - 1) / 2) * width
            x = [place + offset for place in range(len(places))]
            y = [heights.get(place, np.nan) for place in places]
            axes.bar(x, y, width, label=label, color=COLOURS[index % len(COLOURS)])
        axes.set_xticks(range(len(places)), places)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("drafted token")
        axes.set_ylabel("share accepted")
        if len(groups) > 1:
            axes.legend(fontsize=8.5)
        return _svg(figure, name)


def time_plot(groups: Mapping[str, Mapping[str, float]]) -> str:
    """Return an SVG of horizontal bars, one a group, divided into the seconds of its parts."""
    parts = list(dict.fromkeys(part for sizes in groups.values() for part in sizes))
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "time"}):
        figure, axes = _figure(height=0.9 + 0.45 * len(groups))
        left = np.zeros(len(groups))
        for index, part in enumerate(parts):
            sizes = np.array([heights.get(part, 0.0) for heights in groups.values()])
            colour = COLOURS[index % len(COLOURS)]
            axes.barh(list(groups), sizes, left=left, label=part, color=colour, height=0.55)
            left += sizes
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.legend(fontsize=8.5, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
        return _svg(figure, "time")


def thin(steps: Sequence[float], values: Sequence[float]) -> np.ndarray:
    """Return float64 [4, n] of step, mean, least and greatest value, n at most 400.

    Points with a non-finite value are left out.
    """
    points = np.array([steps, values], dtype=np.float64)
    points = points[:, np.isfinite(points).all(axis=0)]
    if points.shape[1] == 0:
        return np.empty((4, 0))
    parts = np.array_split(points, min(MAX_POINTS, points.shape[1]), axis=1)
    rows = [(part[0].mean(), part[1].mean(), part[1].min(), part[1].max()) for part in parts]
    return np.array(rows).T


def _draw_curve(axes: Axes, curve: Curve, colour: str, has_markers: bool) -> None:
    step, mean, low, high = thin(curve.steps, curve.values)
    marker = "o" if has_markers or len(step) == 1 else None
    axes.plot(step, mean, color=colour, label=curve.label, linewidth=1.5, marker=marker, ms=3.5)
    if len(step) < len(curve.values):
        axes.fill_between(step, low, high, color=colour, alpha=0.18, linewidth=0)


def _figure(height: float = _SIZE_INCHES[1]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_SIZE_INCHES[0], height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": name})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Several plots share a page, and ids of a page are unique; nothing refers to those of groups.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    # The page sets the width; the view box keeps the proportions.
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*pt"', "", head)
    return f'{head} role="img" aria-label="{name}">{rest}'
