"""Registration of a user's optimizer, so that tables can be attached to it like to a built-in one.

Plans, param groups and command lines name optimizers by text, so a process resolves names through one registry. It only
grows, and only by this function.
"""

from __future__ import annotations

from dataclasses import is_dataclass

from tilerec.errors import ConfigError
from tilerec.ops.update.rules import Rule, register_rule
from tilerec.spec.optimizer import SPECS, OptimizerSpec


def register_optimizer(spec: type[OptimizerSpec], rule: type[Rule]) -> None:
    """Add an optimizer: its spec under the name of the class, its row rule under `spec.rule`.

    The rule runs as plain PyTorch on every device, without a kernel of its own. Register it in every process that
    attaches the optimizer or reads a plan or a checkpoint of it.

    Args:
        spec: a frozen dataclass; every field has a default. The class attribute `rule` is the rule's name.
        rule: its arithmetic, with the slots and sums that the spec states.

    Raises:
        ConfigError: a name is taken or missing, the spec is not of that form, or spec and rule do not match.
    """
    name = spec.__name__ if isinstance(spec, type) else repr(spec)
    where = f"register_optimizer({name:.80})"
    if not (isinstance(spec, type) and issubclass(spec, OptimizerSpec) and is_dataclass(spec)):
        raise ConfigError(f"{where}: got no spec; expected a dataclass that derives from OptimizerSpec.")
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise ConfigError(f"{where}: got rule {rule!r:.80}; expected a class that derives from tilerec.optim.Rule.")
    if not vars(spec)["__dataclass_params__"].frozen:
        raise ConfigError(f"{where}: the spec is mutable; expected @dataclass(frozen=True), as specs are shared.")
    if name in SPECS:
        raise ConfigError(f"{where}: the name is taken; expected none of {', '.join(SPECS)}. Rename the class.")
    rule_name = getattr(spec, "rule", None)
    if not isinstance(rule_name, str):
        raise ConfigError(f'{where}: got rule={rule_name!r:.80}; expected a class attribute `rule = "name"`.')
    try:
        example = spec()  # type: ignore[call-arg]
    except TypeError as error:
        raise ConfigError(
            f"{where}: it cannot be made without arguments ({error}). Give every field a default, and define every "
            "abstract method."
        ) from error
    made = rule(example.hyper())
    stated = tuple(slot.per for slot in example.slots), example.partials
    found = made.slot_kinds, tuple(made.sums(phase) for phase in range(made.phases))
    if stated != found:
        raise ConfigError(
            f"{where}: the spec states slots and sums per phase {stated}, its rule {found}; expected equal ones. "
            "Correct `slots` and `partials`, or the rule's `slot_kinds`, `phases` and `sums`."
        )
    register_rule(rule_name, rule)
    SPECS[name] = spec
