"""Small sums and JSON tasks written by templates, each with its worked answer: two more things that nano can talk
about."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

_NAMES = (
    "Ada",
    "Alan",
    "Grace",
    "Edsger",
    "Barbara",
    "Donald",
    "Frances",
    "Ken",
    "Mary",
    "Niklaus",
    "Radia",
    "Tony",
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Eva",
    "Felix",
    "Hanna",
    "Ivan",
    "Julia",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
    "Wendy",
    "Yuki",
)
_CITIES = (
    "Paris",
    "London",
    "Berlin",
    "Madrid",
    "Rome",
    "Vienna",
    "Prague",
    "Oslo",
    "Lisbon",
    "Athens",
    "Dublin",
    "Tokyo",
    "Cairo",
    "Lima",
    "Nairobi",
    "Toronto",
    "Sydney",
    "Mumbai",
    "Seoul",
    "Boston",
    "Chicago",
)
_THINGS = (
    "apples",
    "books",
    "coins",
    "pencils",
    "stamps",
    "marbles",
    "cards",
    "shells",
    "tickets",
    "cookies",
    "keys",
    "flowers",
    "stones",
    "letters",
    "buttons",
    "oranges",
    "bottles",
    "candles",
    "boxes",
    "photos",
)
_JOBS = ("teacher", "engineer", "doctor", "painter", "farmer", "pilot", "writer", "nurse", "cook", "lawyer", "student")
_COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey", "orange", "purple")
_WORDS = ("cache", "queue", "index", "worker", "gateway", "archive", "search", "mail", "backup", "report", "billing")

Task = tuple[str, str]


def _written_sum(a: int, b: int) -> str:
    """Addition digit by digit, with the carry said aloud."""
    steps, carry, x, y = [], 0, a, b
    while x or y or carry:
        p, q = x % 10, y % 10
        if not (x or y):
            steps.append(f"the carry {carry} comes first")
            break
        total = p + q + carry
        said = f"{p} + {q}" + (f" + {carry}" if carry else "")
        steps.append(f"{said} = {total}" + (f", write {total % 10}, carry 1" if total > 9 else ""))
        carry, x, y = total // 10, x // 10, y // 10
    return "; ".join(steps)


def _sum(rng: random.Random) -> Task:
    a, b = rng.randint(2, 999), rng.randint(2, 999)
    question = rng.choice(("What is {} + {}?", "Add {} and {}.", "Calculate {} + {}."))
    return question.format(a, b), f"From the right: {_written_sum(a, b)}. So {a} + {b} = {a + b}."


def _difference(rng: random.Random) -> Task:
    b, c = rng.randint(2, 99), rng.randint(1, 99)
    return rng.choice(("What is {} - {}?", "Calculate {} - {}.")).format(
        b + c, b
    ), f"{b + c} - {b} = {c}, because {b} + {c} = {b + c}."


def _product(rng: random.Random) -> Task:
    a, b = rng.randint(2, 12), rng.randint(2, 99)
    tens, ones = b // 10 * 10, b % 10
    if not tens or not ones:
        return f"What is {a} times {b}?", f"{a} times {b} is {a * b}."
    return (
        f"What is {a} times {b}?",
        f"{a} * {tens} = {a * tens} and {a} * {ones} = {a * ones}. {a * tens} + {a * ones} = {a * b}, so {a} * {b} = {a * b}.",
    )


def _quotient(rng: random.Random) -> Task:
    a, b = rng.randint(2, 12), rng.randint(2, 20)
    return f"What is {a * b} divided by {a}?", f"{a} * {b} = {a * b}, so {a * b} / {a} = {b}."


def _bought(rng: random.Random) -> Task:
    name, thing, a, b = rng.choice(_NAMES), rng.choice(_THINGS), rng.randint(2, 60), rng.randint(2, 60)
    if rng.random() < 0.5:
        return (
            f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?",
            f"{name} starts with {a} {thing} and buys {b} more. {a} + {b} = {a + b}. {name} has {a + b} {thing} now.",
        )
    other = rng.choice([n for n in _NAMES if n != name])
    return (
        f"{name} has {a + b} {thing} and gives {b} to {other}. How many {thing} are left?",
        f"{name} starts with {a + b} {thing} and gives away {b}. {a + b} - {b} = {a}. {name} has {a} {thing} left.",
    )


def _boxes(rng: random.Random) -> Task:
    thing, a, b = rng.choice(_THINGS[:-2]), rng.randint(2, 12), rng.randint(2, 30)
    return (
        f"There are {a} boxes with {b} {thing} each. How many {thing} are there?",
        f"There are {a} boxes and each holds {b} {thing}. {a} * {b} = {a * b}. There are {a * b} {thing}.",
    )


def _price(rng: random.Random) -> Task:
    name, thing, count, price = rng.choice(_NAMES), rng.choice(_THINGS), rng.randint(2, 12), rng.randint(2, 15)
    paid = count * price + rng.randint(1, 40)
    return (
        f"{name} buys {count} {thing} for {price} euros each and pays with {paid} euros. How much change does {name} get?",
        f"{count} {thing} cost {count} * {price} = {count * price} euros. "
        f"{paid} - {count * price} = {paid - count * price}. "
        f"{name} gets {paid - count * price} euros back.",
    )


def _sequence(rng: random.Random) -> Task:
    first, step = rng.randint(1, 60), rng.randint(2, 15)
    row = [first + step * i for i in range(5)]
    shown = ", ".join(map(str, row[:4]))
    return (
        f"What comes next: {shown}?",
        f"Each number is {step} more than the one before. {row[3]} + {step} = {row[4]}.",
    )


def _compare(rng: random.Random) -> Task:
    a, b = rng.sample(range(1, 1000), 2)
    return f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}; the difference is {abs(a - b)}."


def _minutes(rng: random.Random) -> Task:
    hours, more = rng.randint(1, 12), rng.choice((0, 5, 10, 15, 20, 30, 45))
    asked = f"{hours} hours" + (f" and {more} minutes" if more else "")
    answer = f"One hour has 60 minutes. {hours} * 60 = {hours * 60}."
    if more:
        answer += f" {hours * 60} + {more} = {hours * 60 + more}."
    return f"How many minutes are {asked}?", f"{answer} So it is {hours * 60 + more} minutes."


def _area(rng: random.Random) -> Task:
    a, b = rng.randint(2, 30), rng.randint(2, 12)
    return (
        f"A rectangle is {a} metres long and {b} metres wide. What are its area and its perimeter?",
        f"The area is {a} * {b} = {a * b} square metres. The perimeter is 2 * ({a} + {b}) = {2 * (a + b)} metres.",
    )


def _person(rng: random.Random) -> Task:
    name, age, city, job = rng.choice(_NAMES), rng.randint(18, 80), rng.choice(_CITIES), rng.choice(_JOBS)
    record = {"name": name, "age": age, "city": city, "job": job}
    asked = rng.choice(
        (
            f"Give me a JSON object for {name}, {age} years old, a {job} from {city}.",
            f"Extract name, age, city and job as JSON: {name} is a {job}. {name} is {age} and lives in {city}.",
            f"Turn this into JSON: name={name}; age={age}; city={city}; job={job}",
        )
    )
    return asked, json.dumps(record)


def _product_record(rng: random.Random) -> Task:
    thing, colour, price, stock = rng.choice(_THINGS), rng.choice(_COLOURS), rng.randint(1, 99), rng.randint(0, 500)
    record = {"product": thing, "colour": colour, "price": price, "in_stock": stock > 0, "stock": stock}
    return f"Write JSON for a product: {colour} {thing}, {price} euros, {stock} in stock.", json.dumps(record, indent=2)


def _server(rng: random.Random) -> Task:
    word, port, workers, debug = (
        rng.choice(_WORDS),
        rng.randint(1024, 9999),
        rng.choice((1, 2, 4, 8, 16)),
        rng.random() < 0.5,
    )
    record = {"service": word, "host": f"{word}.example.org", "port": port, "workers": workers, "debug": debug}
    return (
        f"Write a JSON configuration for the {word} service on port {port} with {workers} workers and debug "
        f"{'on' if debug else 'off'}.",
        json.dumps(record, indent=2),
    )


def _list(rng: random.Random) -> Task:
    chosen = rng.sample(rng.choice((_CITIES, _COLOURS, _JOBS, _NAMES)), rng.randint(3, 6))
    if rng.random() < 0.5:
        return f"Sort these words and give a JSON list: {', '.join(chosen)}", json.dumps(sorted(chosen))
    return f"Make a JSON list of these words: {', '.join(chosen)}", json.dumps(chosen)


def _order(rng: random.Random) -> Task:
    name = rng.choice(_NAMES)
    lines = [(thing, rng.randint(1, 20)) for thing in rng.sample(_THINGS, rng.randint(2, 4))]
    record = {"customer": name, "items": [{"item": t, "count": n} for t, n in lines], "total": sum(n for _, n in lines)}
    return f"{name} orders {', '.join(f'{n} {t}' for t, n in lines)}. Write the order as JSON.", json.dumps(record, indent=2)


_MATHS = (
    _sum,
    _sum,
    _difference,
    _product,
    _quotient,
    _bought,
    _bought,
    _boxes,
    _price,
    _sequence,
    _compare,
    _minutes,
    _area,
)
_JSON = (_person, _person, _product_record, _server, _list, _order)


def _draw(makers: tuple[Callable[[random.Random], Task], ...], count: int, seed: int) -> Iterator[Task]:
    """`count` tasks with different questions."""
    rng, asked = random.Random(seed), set[str]()
    while len(asked) < count:
        question, answer = rng.choice(makers)(rng)
        if question not in asked:
            asked.add(question)
            yield question, answer


def maths_tasks(count: int, seed: int = 0) -> Iterator[Task]:
    """Questions about numbers, with the steps in the answer."""
    return _draw(_MATHS, count, seed)


def json_tasks(count: int, seed: int = 0) -> Iterator[Task]:
    """Facts in words to be written as JSON."""
    return _draw(_JSON, count, seed)
