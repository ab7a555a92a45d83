"""Rewards of sampled answers: how near they come to any of the reference answers, how long they are, how often they repeat."""


def distance(a, b):
    """Levenshtein's distance of two sequences of tokens."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]


def trimmed(tokens, end):
    return tokens[: tokens.index(end)] if end in tokens else tokens


def reward(answer, references, end=1):
    answer = trimmed(answer, end)
    near = max(1 - distance(answer, reference) / max(len(answer), len(reference), 1) for reference in references)
    repeats = 1 - len(set(zip(answer, answer[1:]))) / max(1, len(answer) - 1)
    return near - 0.2 * repeats


def rewards(answers, references):
    """One reward for each answer; each has references of its own."""
    return [reward(answer, own) for answer, own in zip(answers, references)]


def rewards_by(pool, answers, references):
    return pool.starmap_async(reward, list(zip(answers, references)), chunksize=4)
