"""Messages between ranks: who sends how much to whom, chunks on their way round a ring, and when each message is on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labkit.figures.colours import LINES
from labkit.figures.picture import FAINT, INK, Picture, new_picture, quiet_legend, styled
from labkit.figures.units import human_bytes, time_unit

if TYPE_CHECKING:
    from labkit.recorder import Recording

_SHADES = ("#f3f6f9", "#cfe1ee", "#9cc5e0", "#5ba3cf", "#0072b2")  # from a rank's own part to the whole sum
_MOVED = "#d55e00"


@styled
def traffic(table: Sequence[Sequence[Sequence[int]]], *, title: str) -> Picture:
    """Who sends to whom: row = sender, column = receiver, in each cell messages and bytes.

    table : table[sender][receiver] = (messages, bytes)
    """
    ranks = len(table)
    picture, axes = new_picture(min(1.6 + 1.05 * ranks, 8.4), min(1.2 + 0.5 * ranks, 6.0))
    most = max((cell[1] for row in table for cell in row), default=0)
    for sender, row in enumerate(table):
        for receiver, (count, nbytes) in enumerate(row):
            shade = _SHADES[1 + round(3 * nbytes / most)] if nbytes else _SHADES[0] if count else "white"
            axes.add_patch(Rectangle((receiver - 0.5, sender - 0.5), 1, 1, facecolor=shade, edgecolor=FAINT))
            if count:
                told = f"{count}x\n{human_bytes(nbytes)}" if ranks <= 6 else f"{count}"
                colour = "white" if shade == _SHADES[4] else INK
                axes.text(receiver, sender, told, ha="center", va="center", fontsize=7.5, color=colour)
    axes.set(xlim=(-0.5, ranks - 0.5), ylim=(ranks - 0.5, -0.5), xlabel="to rank", ylabel="from rank")
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks))
    axes.tick_params(length=0)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title, pad=8)
    told = [
        f"rank {sender} to rank {receiver} {count} message{'s' * (count != 1)}, {human_bytes(nbytes)}"
        for sender, row in enumerate(table)
        for receiver, (count, nbytes) in enumerate(row)
        if count
    ]
    picture.alt = f"{title}. " + ("; ".join(told) or "nobody sends anything") + "."
    return picture


def chunk_states(recordings: Sequence[Recording], chunk_bytes: Sequence[int]) -> list[tuple[list[list[int]], list[list[bool]]]]:
    """What each rank's chunks hold after each step of a ring, followed from the recorded messages.

    recordings : one per rank; chunk_bytes : bytes of each chunk, all different, so that a message tells which chunk it carried
    Returns (parts, moved) for the start and for each step: parts[rank][chunk] is how many ranks' numbers are in it, moved[rank][chunk]
    says that it arrived in this step. In the first W - 1 steps what arrives is added, in later ones it takes the place of what was
    there. Raises ValueError for a message whose size is no chunk's.
    """
    ranks = len(recordings)
    which = {nbytes: chunk for chunk, nbytes in enumerate(chunk_bytes)}
    if len(which) < ranks:
        raise ValueError("chunks need different sizes: a message tells which chunk it carried by its bytes")
    sent = [[(m.peer, m.bytes_sent) for m in recording.comm("send")] for recording in recordings]
    unknown = [nbytes for row in sent for _, nbytes in row if nbytes not in which]
    if unknown:
        raise ValueError(f"a message of {unknown[0]} bytes is none of the chunks ({', '.join(map(str, chunk_bytes))} bytes)")
    holds = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    nothing = [[False] * ranks for _ in range(ranks)]
    states = [([[1] * ranks for _ in range(ranks)], nothing)]
    for step in range(max((len(row) for row in sent), default=0)):
        arriving = [
            (peer, which[nbytes], set(holds[rank][which[nbytes]]))
            for rank, row in enumerate(sent)
            for peer, nbytes in row[step : step + 1]
        ]
        moved = [[False] * ranks for _ in range(ranks)]
        for peer, chunk, parts in arriving:
            holds[peer][chunk] = holds[peer][chunk] | parts if step < ranks - 1 else parts
            moved[peer][chunk] = True
        states.append(([[len(parts) for parts in row] for row in holds], moved))
    return states


@styled
def ring_steps(recordings: Sequence[Recording], chunk_bytes: Sequence[int], *, title: str) -> Picture:
    """Chunks on their way round the ring, step by step, from the messages that each rank recorded (see `chunk_states`).

    One panel per step: a row per rank, a column per chunk, in each cell the number of ranks whose numbers are in it, framed where it
    has just arrived. Up to 6 ranks.
    """
    states = chunk_states(recordings, chunk_bytes)
    ranks = len(recordings)
    across = ranks
    down = -(-len(states) // across)
    picture, grid = new_picture(8.4, 0.75 + down * (0.62 + 0.27 * ranks), nrows=down, ncols=across, squeeze=False)
    panels = [axes for row in grid for axes in row]
    # The start and the W - 1 steps that add fill the first row; the steps that copy begin the second.
    for step, ((parts, moved), axes) in enumerate(zip(states, panels, strict=False)):
        _panel(axes, parts, moved, "start" if step == 0 else f"step {step}: {'add' if step < ranks else 'copy'}")
        if step % across == 0:
            axes.set_ylabel("rank")
            axes.set_yticks(range(ranks))
        if step >= len(states) - across:
            axes.set_xlabel("chunk")
            axes.set_xticks(range(ranks))
    for axes in panels[len(states) :]:
        axes.set_axis_off()
    picture.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=10.5)
    finished = [sum(count == ranks for row in parts for count in row) for parts, _ in states]
    told = "; ".join(f"after step {step} {count} of {ranks * ranks}" for step, count in enumerate(finished) if step)
    picture.alt = f"{title}. {ranks} ranks, {ranks} chunks each. Chunks that hold the whole sum: {told}."
    return picture


def _panel(axes: Axes, parts: list[list[int]], moved: list[list[bool]], head: str) -> None:
    ranks = len(parts)
    for rank, row in enumerate(parts):
        for chunk, count in enumerate(row):
            shade = _SHADES[round((count - 1) / max(ranks - 1, 1) * (len(_SHADES) - 1))]
            axes.add_patch(Rectangle((chunk - 0.5, rank - 0.5), 1, 1, facecolor=shade, edgecolor="white"))
            colour = "white" if count == ranks else INK
            axes.text(chunk, rank, str(count), ha="center", va="center", fontsize=8, color=colour)
            if moved[rank][chunk]:
                axes.add_patch(Rectangle((chunk - 0.42, rank - 0.42), 0.84, 0.84, fill=False, edgecolor=_MOVED, linewidth=1.8))
    axes.set(xlim=(-0.5, ranks - 0.5), ylim=(ranks - 0.5, -0.5), xticks=[], yticks=[])
    axes.set_title(head, fontsize=8.5, weight="normal", pad=3)
    axes.tick_params(length=0)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


@styled
def message_lanes(runs: Mapping[str, Sequence[Recording]], *, title: str) -> Picture:
    """When each message is on a simulated wire: one group of lanes per run, one lane per sending rank, a bar per message.

    runs : name -> one recording per rank, made with a `Link`. A bar's number and colour are the rank that it goes to. Time counts from
           the first message of the run.
    """
    lanes = [(name, rank) for name, recordings in runs.items() for rank in range(len(recordings))]
    picture, axes = new_picture(8.4, 1.1 + 0.3 * len(lanes) + 0.25 * len(runs))
    spans = {name: _bars(recordings) for name, recordings in runs.items()}
    last = max((end for bars in spans.values() for *_, end in bars), default=0.0)
    unit, scale = time_unit(last or 1.0)
    place, ticks, labels = 0.0, [], []
    for name, recordings in runs.items():
        axes.text(0, place - 0.05, name, fontsize=8.5, weight="bold", va="center")
        place += 0.85
        for rank in range(len(recordings)):
            for sender, peer, start, end in spans[name]:
                if sender == rank:
                    style = {"facecolor": LINES[peer % len(LINES)], "edgecolor": "white", "linewidth": 0.8}
                    axes.add_patch(Rectangle((start / scale, place - 0.38), (end - start) / scale, 0.76, **style))
                    if end - start > 0.025 * last:
                        axes.text((start + end) / 2 / scale, place, str(peer), color="white", ha="center", va="center", fontsize=7.5)
            ticks.append(place)
            labels.append(f"rank {rank}")
            place += 1.0
        place += 0.2
    axes.set(xlim=(0, last / scale * 1.02 or 1), ylim=(place - 0.3, -0.6), xlabel=f"{unit} on the simulated wire; numbers: receivers")
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.grid(True, axis="x", color=FAINT, linewidth=0.6)
    axes.set_title(f"{title} (simulated)", pad=6)
    told = [
        f"{name}: {len(bars)} messages, the last one ends after {max((end for *_, end in bars), default=0.0) / scale:.3g} {unit}"
        for name, bars in spans.items()
    ]
    picture.alt = f"{title} (simulated). " + "; ".join(told) + "."
    return picture


def _bars(recordings: Sequence[Recording]) -> list[tuple[int, int, float, float]]:
    """(sender, receiver, first and last second on the wire) of every message, counted from the first one of the run."""
    bars = [
        (rank, message.peer, message.start_s + recording.clock_s, message.end_s + recording.clock_s)
        for rank, recording in enumerate(recordings)
        for message in recording.comm("send")
    ]
    first = min((start for _, _, start, _ in bars), default=0.0)
    return [(rank, peer, start - first, end - first) for rank, peer, start, end in bars]


@styled
def predicted_times(measured: Mapping[str, Mapping[int, float]], predicted: Mapping[str, Mapping[int, float]], *, title: str) -> Picture:
    """Seconds on a simulated wire against bytes: points were measured, lines were predicted. Both are name -> bytes -> seconds."""
    picture, axes = new_picture(6.8, 3.8)
    for number, (name, times) in enumerate(measured.items()):
        colour, marker = LINES[number % len(LINES)], "os^Dv<"[number % 6]
        line = predicted.get(name, {})
        axes.plot(list(line), [1000 * value for value in line.values()], color=colour, ls="--", lw=1.2)
        axes.plot(list(times), [1000 * value for value in times.values()], color=colour, ls="", marker=marker, ms=5.5, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the tensor", ylabel="ms")
    axes.set_title(f"{title}: measured (points), predicted (lines), on a simulated wire", pad=24)
    quiet_legend(axes, ncols=4)
    told = [
        f"{name}: " + ", ".join(f"{human_bytes(size)} {1000 * value:.3g} ms, predicted {1000 * predicted[name][size]:.3g} ms"
                                for size, value in times.items() if size in predicted.get(name, {}))
        for name, times in measured.items()
    ]  # fmt: skip
    picture.alt = f"{title}, on a simulated wire. " + "; ".join(told) + "."
    return picture
