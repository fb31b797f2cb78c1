"""Weights of the positions of one chain, by loops over the published definitions."""


def slow_weights(name, chain, extra):
    """The weights of one chain, position by position. chain: {position: (fixed, probability, right)}."""
    reach, reached = 1.0, {}
    for position in sorted(chain):
        q = chain[position][1]
        reach *= 0.5 * q + 0.5 if name == "dpace" else q
        reached[position] = reach
    later = {position: sum(share for other, share in reached.items() if other >= position) for position in chain}
    if name == "dpace":
        return later
    if name == "chain":
        return {position: fixed + extra * later[position] / len(chain) for position, (fixed, _, _) in chain.items()}
    wrong = min((position for position, (_, _, right) in chain.items() if not right), default=None)
    return {position: fixed + extra * (position == wrong) for position, (fixed, _, _) in chain.items()}
