"""Four in a row against itself: a tree search in Python asks a net about each new position; the games are kept to learn from."""
import argparse
import math
import time

import torch
import torch.nn as nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, COLUMNS = 6, 7


class Judge(nn.Module):
    """How good each column is and who will win; double precision, so that a game can be told again move by move."""

    def __init__(self, wide, deep):
        super().__init__()
        self.enter = nn.Linear(2 * ROWS * COLUMNS, wide)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, wide), nn.ReLU()) for _ in range(deep))
        self.columns, self.winner = nn.Linear(wide, COLUMNS), nn.Linear(wide, 1)

    def forward(self, boards):
        x = self.enter(boards)
        for block in self.blocks:
            x = x + block(x)
        return self.columns(x).softmax(-1), self.winner(x)[:, 0].tanh()


class Board:
    def __init__(self, mine=0, theirs=0, heights=(0,) * COLUMNS):
        self.mine, self.theirs, self.heights = mine, theirs, heights

    def after(self, column):
        """The other side's view once a piece fell into the column. One empty row above keeps columns apart."""
        stone = 1 << (column * (ROWS + 1) + self.heights[column])
        heights = (*self.heights[:column], self.heights[column] + 1, *self.heights[column + 1 :])
        return Board(self.theirs, self.mine | stone, heights)

    def moves(self):
        return [column for column in range(COLUMNS) if self.heights[column] < ROWS]

    def lost(self):
        for way in (1, ROWS, ROWS + 1, ROWS + 2):
            pairs = self.theirs & (self.theirs >> way)
            if pairs & (pairs >> 2 * way):
                return True
        return False

    def planes(self):
        places = [column * (ROWS + 1) + row for column in range(COLUMNS) for row in range(ROWS)]
        return [float(side >> place & 1) for side in (self.mine, self.theirs) for place in places]


class Node:
    def __init__(self, board, prior):
        self.board, self.prior, self.visits, self.worth, self.children = board, prior, 0, 0.0, {}

    def best(self):
        spread = 1.5 * math.sqrt(self.visits)
        return max(self.children.values(), key=lambda child: spread * child.prior / (1 + child.visits) - (child.worth / child.visits if child.visits else 0.0))


def play(simulations, opening):
    """A whole game. Yields each position that the net has to judge, and is sent what the net says."""
    board, said = Board(), []
    for column in opening:
        board = board.after(column)
    while board.moves() and not board.lost():
        root = Node(board, 1.0)
        for _ in range(simulations):
            path = [root]
            while path[-1].children:
                path.append(path[-1].best())
            leaf = path[-1]
            if leaf.board.lost():
                worth = -1.0
            elif not leaf.board.moves():
                worth = 0.0
            else:
                priors, worth = yield leaf.board
                leaf.children = {column: Node(leaf.board.after(column), priors[column]) for column in leaf.board.moves()}
            for node in reversed(path):
                node.visits += 1
                node.worth += worth
                worth = -worth
        column = max(root.children, key=lambda one: root.children[one].visits)
        said.append(column)
        board = board.after(column)
    return said


@torch.inference_mode()
def judge(net, boards):
    planes = torch.tensor([board.planes() for board in boards], dtype=torch.float64).to(DEVICE)
    priors, worth = net(planes)
    return list(zip(priors.tolist(), worth.tolist()))


def one_by_one(net, games):
    played = []
    for game in games:
        asked = next(game)
        try:
            while True:
                asked = game.send(judge(net, [asked])[0])
        except StopIteration as end:
            played.append(end.value)
    return played


def side_by_side(net, games):
    """All games stop at their next question, and the net answers them in one batch."""
    played = [None] * len(games)
    asked = {number: next(game) for number, game in enumerate(games)}
    while asked:
        for number, answer in zip(list(asked), judge(net, list(asked.values()))):
            try:
                asked[number] = games[number].send(answer)
            except StopIteration as end:
                played[number] = end.value
                del asked[number]
    return played


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--games", type=int, default=20)
    options = parser.parse_args()
    wide, deep, count, simulations = (32, 1, 4, 6) if options.tiny else (768, 8, options.games, 36)
    torch.manual_seed(0)
    start = time.perf_counter()
    net = Judge(wide, deep).double().eval().to(DEVICE)
    games = [play(simulations, (number % COLUMNS, number // COLUMNS % COLUMNS)) for number in range(count)]
    played = (side_by_side if options.fixed else one_by_one)(net, games)
    told = sum((move + 1) * (3 * place + number + 1) for number, game in enumerate(played) for place, move in enumerate(game))
    print(f"{count} games, {sum(map(len, played))} moves, checksum {told}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
