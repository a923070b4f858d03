"""Which validation examples are shown, so that a reader sees others each time."""


def samples(step_index: int, pairs: int, count: int) -> list[int]:
    """Indices of ``count`` of the ``pairs`` for validation number ``step_index``, counted from any start; all of them where there are fewer.

    Validations walk through the set, one behind the other, and begin anew at its end. The number alone decides, so a resumed run shows the same.
    """
    return [(step_index * count + i) % pairs for i in range(min(count, pairs))]
