"""What a run says while it trains: a bar on a terminal, plain lines elsewhere; always on stderr."""

import sys
import time
from typing import Any

from tqdm import tqdm


class Progress:
    """Shows the step, loss, speed and time left."""

    def __init__(self, start: int, steps: int):
        self.bar = (
            tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )
        self.start, self.step, self.steps, self.began = start, start, steps, time.monotonic()

    def advance(self) -> None:
        """One step is under way."""
        self.step += 1
        if self.bar is not None:
            self.bar.update()

    def show(self, entry: dict[str, Any]) -> None:
        """The figures of the last interval."""
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"loss {entry['loss']:.3f}, {entry['tokens_per_second']:,.0f} tokens/s"
            )
            return
        left = (
            (time.monotonic() - self.began)
            / max(1, self.step - self.start)
            * (self.steps - self.step)
        )
        minutes, seconds = divmod(round(left), 60)
        speed = f"{entry['tokens_per_second']:,.0f} tokens/s"
        self.say(
            f"step {entry['step']}/{self.steps}  loss {entry['loss']:.3f}  {speed}  {minutes}:{seconds:02} left"
        )

    def say(self, message: str) -> None:
        """A line of its own."""
        if self.bar is not None:
            self.bar.write(message, file=sys.stderr)
        else:
            print(message, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
