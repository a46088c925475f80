"""Groups of verbs that list the known ones where a verb is unknown."""

from typing import Any

from typer.core import TyperGroup

from bench.errors import unknown


class KnownVerbs(TyperGroup):
    """Raises BadInput for a verb that the group does not have."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            raise unknown("command", args[0], self.commands)
        return super().resolve_command(ctx, args)
