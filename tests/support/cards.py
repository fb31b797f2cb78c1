"""The facts of well-known GPUs, for tests of plans on cards that are not there."""

from spec_compile.kernels.card import Card


def make_card(
    name: str, capability: tuple[int, int], processors: int, gigabytes: float, megabytes: int, gigahertz: float
) -> Card:  # fmt: skip
    """A `Card` by its data sheet; what a multiprocessor holds follows from the capability."""
    kib, threads = {(7, 5): (64, 1024), (8, 0): (164, 2048), (9, 0): (228, 2048), (10, 0): (228, 2048)}.get(
        capability, (100, 1536)
    )
    reserved = 0 if capability == (7, 5) else 1024  # of each program, by the driver
    return Card(
        name, capability, processors, (kib << 10) - reserved, kib << 10, threads, gigabytes * 1e9, megabytes << 20,
        gigahertz * 1e9,
    )  # fmt: skip


CARDS = {
    card.name: card
    for card in (
        make_card("T4", (7, 5), 40, 320, 4, 1.59),
        make_card("A100", (8, 0), 108, 2039, 40, 1.41),
        make_card("RTX 3090", (8, 6), 82, 936, 6, 1.70),
        make_card("L4", (8, 9), 58, 300, 48, 2.04),
        make_card("RTX 4090", (8, 9), 128, 1008, 72, 2.52),
        make_card("H100", (9, 0), 132, 3350, 50, 1.98),
        make_card("H200", (9, 0), 132, 4917, 60, 1.98),
        make_card("B200", (10, 0), 148, 8000, 126, 1.97),
        make_card("RTX 5090", (12, 0), 170, 1792, 96, 2.41),
    )
}
"""GPUs by name, as their drivers or data sheets have them."""
