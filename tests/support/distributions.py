"""Tests of distributions: the joint one of a text's first tokens, and how well drawn ones fit."""

import torch

FITS = 1e-3  # p-values above it are expected of what is right
PLACES = 3  # tokens after the prompt whose joint distribution is compared


def p_value(counts, expected):
    """Chi-square of counts [C, n] against expectations [C, n], one multinomial a row; cells below 5 are pooled."""
    statistic = degrees = 0
    for seen, wanted in zip(counts, expected):
        if (seen[wanted == 0] > 0).any():
            return 0.0
        wanted, order = wanted.double().sort()
        pooled = max(int((wanted < 5).sum()), int((wanted.cumsum(0) < 5).sum()) + 1)
        seen, wanted = (torch.cat([x[:pooled].sum()[None], x[pooled:]]) for x in (seen[order], wanted))
        statistic += ((seen - wanted) ** 2 / wanted).sum()
        degrees += len(wanted) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.as_tensor(statistic / 2))) if degrees else 1.0


def joint(conditional, vocab):
    """The chance [vocab ** PLACES] of all texts of PLACES tokens; conditional: texts [n, l] -> next token's [n, V]."""
    chance, texts = torch.ones(1, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.int64)
    for _ in range(PLACES):
        chance = (chance[:, None] * conditional(texts)).flatten()
        texts = torch.cat([texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(texts))[:, None]], dim=1)
    return chance


def fit(samples, chances, vocab):
    """The least p-value of the first 1, 2 and 3 tokens of samples [C, R, PLACES], whose texts have `chances` [C, *]."""
    values = []
    for places in range(1, PLACES + 1):
        powers = vocab ** torch.arange(places).flip(0)
        cells = (samples[:, :, :places] * powers).sum(dim=2)
        counts = torch.stack([row.bincount(minlength=vocab**places) for row in cells])
        values.append(p_value(counts, samples.shape[1] * chances.view(len(counts), vocab**places, -1).sum(dim=2)))
    return min(values)
