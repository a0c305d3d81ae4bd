"""`python -m chaos.watched ...`: runs covey-chaos and notes which `except` handlers of what it plays are entered."""

from typing import Any

from chaos.checks import handlers


def main() -> Any:
    handlers.install()
    from chaos.main import main as play  # only now: what it loads is watched

    return play()


if __name__ == "__main__":
    main()
