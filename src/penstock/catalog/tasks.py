"""Build captures and materializations, as far as possible without a connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from penstock.catalog import reading
from penstock.catalog.connectors import (
    TaskKind,
    check_endpoint,
    check_followed,
    check_made,
    check_own_schema,
    schemas_of,
)
from penstock.catalog.diagnostics import did_you_mean
from penstock.catalog.nodes import Node
from penstock.catalog.paths import check_paths, placed, placed_text
from penstock.catalog.scope import Known, Scope, build_shards, build_source, check_key
from penstock.catalog.secret_references import check_references
from penstock.errors import UserError
from penstock.model.columns import UUID_LOCATION
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import canonical_json
from penstock.model.spec import (
    CaptureBinding,
    CaptureSpec,
    Endpoint,
    FieldSelection,
    FollowedCapture,
    Frozen,
    MaterializationBinding,
    MaterializationSpec,
    OnIncompatible,
    Shards,
    Trigger,
    Triggers,
)
from penstock.model.webhook import header_problem, url_problem
from penstock.runtime.capture import python_code

MAX_TXN_S = 1
MAX_TXN_MATERIALIZATION_S = 300
CAPTURE_INTERVAL_S = 300

_ENDPOINT_KINDS: tuple[Literal["connector", "local", "python", "ingest"], ...] = (
    "connector",
    "local",
    "python",
    "ingest",
)
_ON_INCOMPATIBLE: tuple[OnIncompatible, ...] = (
    "abort",
    "backfill",
    "disableBinding",
    "disableTask",
)


def build_endpoint(
    task: TaskKind, node: Node | None, scope: Scope, environ: Mapping[str, str] | None
) -> Endpoint | None:
    """Build the endpoint; None where the grammar found none."""
    kind = next((k for k in _ENDPOINT_KINDS if node and k in node.members), None)
    inner = node.get(kind) if node and kind else None
    if inner is None or kind is None:
        return None
    config_node = inner if kind == "ingest" else inner.get("config")
    config = scope.sources.follow(config_node) if config_node else None
    module_node = inner.get("module")
    module = scope.sources.code(module_node) if module_node else None
    specification = inner.get("spec")
    schema_node = specification.get("configSchema") if specification else None
    schema = scope.sources.follow(schema_node) if schema_node else None
    for value in (config.node if config else None, inner.get("env")):
        if value is not None:
            check_references(value, scope.sources, environ)
    if schema is not None:
        check_own_schema(config.node if config else None, schema.node, inner, scope.sources)
    schemas = schemas_of(task, node, scope.connectors)
    paths = schemas.config.paths if schemas else ()
    if config is not None:
        check_paths(config.node, paths, scope.sources, environ)
    return Endpoint(
        kind=kind,
        config=Frozen(placed(config.node, paths) if config else {}),
        image=inner.text_of("image"),
        command=reading.texts(inner.get("command")),
        env=reading.text_pairs(inner.get("env")),
        protobuf=reading.flag(inner, "protobuf"),
        module=module.text if module else None,
        module_file=module_node.text if module_node and module and module.file else None,
        config_schema=Frozen(schema.node.plain()) if schema else None,
    )


def never_runs(node: Node) -> bool:
    """True if a task is disabled, or about to be removed."""
    shards = node.get("shards")
    return reading.flag(node, "delete") or (shards is not None and reading.flag(shards, "disable"))


def build_capture(
    name: str, node: Node, scope: Scope, environ: Mapping[str, str] | None
) -> CaptureSpec | None:
    endpoint = build_endpoint("capture", node.get("endpoint"), scope, environ)
    _check_python(node.get("endpoint"), scope)
    bindings_node = node.get("bindings")
    items = bindings_node.items if bindings_node else ()
    if bindings_node is not None and not never_runs(node):
        _check_enabled(bindings_node, "W-DISABLED", "the capture does nothing", scope)
    bindings = [_capture_binding(item, scope) for item in items]
    schemas = schemas_of("capture", node.get("endpoint"), scope.connectors)
    _check_resources(items, scope, schemas.resource if schemas else None)
    check_endpoint(
        "capture",
        node.get("endpoint"),
        items,
        scope.sources,
        scope.connectors,
        disabled=never_runs(node),
    )
    check_made("capture", node.get("endpoint"), endpoint, scope.sources, scope.connectors)
    if endpoint is None:
        return None
    return CaptureSpec(
        name=name,
        endpoint=endpoint,
        bindings=tuple(bindings),
        interval_s=reading.seconds(node, "interval", CAPTURE_INTERVAL_S),
        redact_salt=node.text_of("redactSalt"),
        renamed_from=_renamed_from(name, node, "captures", scope),
        shards=_capture_shards(node.get("shards"), scope),
    )


def _check_enabled(bindings: Node, code: str, so: str, scope: Scope) -> None:
    """Report a task without an active binding."""
    if not all(reading.flag(item, "disable") for item in bindings.items):
        return
    none = "all bindings are disabled" if bindings.items else "there are no bindings"
    scope.sources.error(
        bindings,
        code,
        f"{none}: {so}",
        hint="add or enable one, or disable the task with shards: {disable: true}",
        at=bindings.key_at,
    )


def _capture_shards(node: Node | None, scope: Scope) -> Shards:
    count = node.get("count") if node else None
    if count is not None:
        scope.sources.error(
            count,
            "E-UNSUPPORTED",
            '"count" is not supported for captures',
            hint="remove it: the source says what can be read at the same time",
            at=count.key_at,
        )
    return build_shards(node, scope, max_txn_s=MAX_TXN_S)


def _check_python(endpoint: Node | None, scope: Scope) -> None:
    """Find mistakes in the module of a capture here, without running any of it."""
    python = endpoint.get("python") if endpoint else None
    module = python.get("module") if python else None
    code = scope.sources.code(module) if module else None
    mistake = python_code.check(code.text) if code else None
    if code is not None and mistake is not None:
        at = code.position(mistake.offset)
        scope.sources.error(code.node, mistake.code, mistake.message, hint=mistake.hint, at=at)


def _capture_binding(node: Node, scope: Scope) -> CaptureBinding:
    disabled = reading.flag(node, "disable")
    target = node.get("target")
    if target is not None and target.value is None and not disabled:
        scope.sources.error(
            target,
            "E-REQUIRED",
            "a binding without a target must be disabled",
            hint="add disable: true",
        )
    scope.collection(target)
    return CaptureBinding(
        resource=_resource(node),
        target=target.text if target else None,
        on_invalid=reading.word(node, "onInvalid", ("stop", "skip", "quarantine"), "stop"),
        disable=disabled,
        backfill=reading.whole(node, "backfill", 0),
    )


def build_materialization(
    name: str, node: Node, scope: Scope, environ: Mapping[str, str] | None
) -> MaterializationSpec | None:
    endpoint = build_endpoint("materialization", node.get("endpoint"), scope, environ)
    follows = _followed(node, scope)
    bindings_node = node.get("bindings")
    if bindings_node is None and follows is None and "sourceCapture" not in node.members:
        scope.sources.error(
            node,
            "E-REQUIRED",
            'a materialization needs "bindings"',
            hint="or source, to follow the bindings of a capture",
            at=node.key_at,
        )
    items = bindings_node.items if bindings_node else ()
    if bindings_node is not None and follows is None and not never_runs(node):
        code = "W-DISABLED" if items else "E-CANNOT-RUN"
        _check_enabled(bindings_node, code, "the materialization has nothing to do", scope)
    on_incompatible = reading.word(node, "onIncompatibleSchemaChange", _ON_INCOMPATIBLE, "backfill")
    bindings = [_materialization_binding(item, scope, on_incompatible) for item in items]
    _check_resources(items, scope)
    disabled = never_runs(node)
    check_endpoint(
        "materialization",
        node.get("endpoint"),
        items,
        scope.sources,
        scope.connectors,
        disabled=disabled,
    )
    check_made("materialization", node.get("endpoint"), endpoint, scope.sources, scope.connectors)
    check_followed(node, scope.sources, scope.connectors, disabled=disabled)
    triggers = _triggers(node.get("triggers"), scope, environ)
    if endpoint is None:
        return None
    return MaterializationSpec(
        name=name,
        endpoint=endpoint,
        bindings=tuple(b for b in bindings if b is not None),
        follows=follows,
        on_incompatible=on_incompatible,
        triggers=triggers,
        renamed_from=_renamed_from(name, node, "materializations", scope),
        shards=build_shards(node.get("shards"), scope, max_txn_s=MAX_TXN_MATERIALIZATION_S),
    )


def _followed(node: Node, scope: Scope) -> FollowedCapture | None:
    source = node.get("source") or node.get("sourceCapture")
    capture = source if source is None or source.text is not None else source.get("capture")
    if source is None or capture is None or capture.text is None:
        return None
    scope.refer(capture, "captures", "capture")
    naming = source.get("targetNaming")
    return FollowedCapture(
        capture=capture.text,
        target_naming=Frozen(naming.plain()) if naming else None,
        delta_updates=reading.flag(source, "deltaUpdates"),
        recommended_depth=_depth(source.get("fieldsRecommended")),
    )


def _materialization_binding(
    node: Node, scope: Scope, on_incompatible: OnIncompatible
) -> MaterializationBinding | None:
    source, known = build_source(node.get("source"), scope)
    fields = _field_selection(node.get("fields"), known, scope)
    if source is None:
        return None
    return MaterializationBinding(
        resource=_resource(node),
        source=source,
        fields=fields,
        on_incompatible=reading.word(
            node, "onIncompatibleSchemaChange", _ON_INCOMPATIBLE, on_incompatible
        ),
        priority=reading.whole(node, "priority", 0),
        disable=reading.flag(node, "disable"),
        backfill=reading.whole(node, "backfill", 0),
        takeover=reading.flag(node, "takeover"),
        renamed_from=_renamed_resource(node),
    )


def _renamed_resource(node: Node) -> Frozen | None:
    given = node.get("renamedFrom")
    return None if given is None else Frozen(given.plain())


def _renamed_from(name: str, node: Node, kind: str, scope: Scope) -> str | None:
    """Return a task's former name, which no other task may have now or continue from."""
    given = node.get("renamedFrom")
    if given is None or given.text is None:
        return None
    tasks = scope.defined[kind]
    if given.text in tasks:
        message = f'renamedFrom: "{given.text}" is defined as well'
        hint = "remove the task of the old name: this one continues from where it was"
        scope.sources.error(given, "E-RENAMED", message, hint=hint, see=tasks[given.text])
    for other, task in tasks.items():
        theirs = task.get("renamedFrom")
        if theirs is not None and theirs.text == given.text and other < name:
            message = f'"{other}" was renamed from "{given.text}" too'
            hint = "only one task can continue from it: remove renamedFrom from the other"
            scope.sources.error(given, "E-RENAMED", message, hint=hint, see=theirs)
    return given.text


def _field_selection(node: Node | None, known: Known | None, scope: Scope) -> FieldSelection:
    """Build a field selection: its fields must exist, and must not contradict each other."""
    if node is None:
        return FieldSelection()
    require = node.get("require") or node.get("include")
    required = require.members if require else {}
    exclude, group_by = node.get("exclude"), node.get("groupBy")
    for name, member in required.items():
        _check_field(name, member, known, scope)
        if member.members and scope.connectors is not None:
            message = f'field "{name}" has options, and no connector here has any'
            scope.sources.error(member, "E-UNSUPPORTED", message, hint=f"write {name}: {{}}")
    for item in (*(exclude.items if exclude else ()), *(group_by.items if group_by else ())):
        if item.text is not None:
            _check_field(item.text, item, known, scope)
    for item in exclude.items if exclude else ():
        if item.text in required:
            message = f'field "{item.text}" is both required and excluded'
            scope.sources.error(item, "E-FIELD", message, see=required[item.text or ""])
        if item.text in reading.texts(group_by):
            message = f'field "{item.text}" is both in groupBy and excluded'
            scope.sources.error(item, "E-FIELD", message)
    grouped: dict[str, Node] = {}
    for item in group_by.items if group_by else ():
        if item.text in grouped:
            message = f'groupBy lists "{item.text}" twice'
            scope.sources.error(item, "E-DUP", message, see=grouped[item.text])
        grouped[item.text or ""] = item
        field = known.spec.field(item.text or "") if known else None
        if known and field:
            what = f'groupBy field "{field.name}"'
            check_key(item, what, field.location, known.shape, scope.sources)
    return FieldSelection(
        recommended_depth=_depth(node.get("recommended")),
        require=tuple(sorted((n, Frozen(m.plain() or {})) for n, m in required.items())),
        exclude=tuple(sorted(set(reading.texts(exclude)))),
        group_by=reading.texts(group_by),
    )


def _check_field(name: str, at: Node, known: Known | None, scope: Scope) -> None:
    field = known.spec.field(name) if known else None
    if field is not None and field.location == UUID_LOCATION:
        message = f'"{name}" is no column: only lambdas can read it'
        scope.sources.error(at, "E-FIELD", message, hint="leave it out")
    if known is not None and field is None:
        names = [f.name for f in known.spec.fields]
        scope.sources.error(
            at,
            "E-FIELD",
            f'"{name}" is not a field of {known.spec.name}',
            hint=did_you_mean(name, names, f"fields: {', '.join(names[:8])}"),
        )


def _depth(node: Node | None) -> int | None:
    """Return the levels of recommended fields: true is all, false is none."""
    match node.value if node else True:
        case True:
            return None
        case False:
            return 0
        case int() as levels:
            return levels
        case _:
            return None


def _resource(node: Node) -> Frozen:
    resource = node.get("resource")
    return Frozen(resource.plain() if resource else {})


def _check_resources(
    bindings: Sequence[Node], scope: Scope, schema: ConfigSchema | None = None
) -> None:
    """Report active bindings of one task with the same resource."""
    first: dict[str, tuple[int, Node]] = {}
    for i, binding in enumerate(bindings):
        resource = binding.get("resource")
        if resource is None or not resource.members or reading.flag(binding, "disable"):
            continue
        text = canonical_json(schema.identity(resource.plain()) if schema else resource.plain())
        if text in first:
            earlier, see = first[text]
            message = f"bindings {earlier} and {i} have the same resource"
            scope.sources.error(resource, "E-DUP-RESOURCE", message, see=see)
        first.setdefault(text, (i, resource))


def _check_hook(hook: Node, scope: Scope) -> None:
    """Report what a request cannot carry. Messages do not repeat values, which may be secrets."""
    url, headers, timeout = hook.get("url"), hook.get("headers"), hook.get("timeout")
    if url is not None and url.text is not None and (problem := url_problem(url.text)):
        scope.sources.error(url, "E-WEBHOOK", problem, hint="for example: https://example.com/hook")
    for name, value in (headers.members if headers else {}).items():
        if value.text is not None and (problem := header_problem(name, value.text)):
            hint = "encode it as the receiver expects, in base64 or as %C3%A9"
            scope.sources.error(
                value, "E-WEBHOOK", problem, hint=None if value.text.isascii() else hint
            )
    if timeout is not None and reading.seconds(hook, "timeout", 1) == 0:
        message = "a timeout must be longer than zero"
        scope.sources.error(timeout, "E-WEBHOOK", message, hint="for example: 30s")


def _triggers(
    node: Node | None, scope: Scope, environ: Mapping[str, str] | None
) -> Triggers | None:
    hooks_node = node.get("config") if node else None
    if node is None or hooks_node is None:
        return None
    check_references(hooks_node, scope.sources, environ)
    hooks = [(hook, _trigger(hook)) for hook in hooks_node.items]
    for hook, trigger in hooks:
        _check_hook(hook, scope)
        _check_template(hook.get("payloadTemplate"), trigger, scope)
    return Triggers(hooks=tuple(trigger for _, trigger in hooks))


def _trigger(hook: Node) -> Trigger:
    return Trigger(
        url=placed_text(hook.text_of("url") or "", hook),
        method=reading.word(hook, "method", ("POST", "PUT", "PATCH"), "POST"),
        headers=tuple(
            (name, placed_text(text, hook))
            for name, text in reading.text_pairs(hook.get("headers"))
        ),
        payload_template=hook.text_of("payloadTemplate") or "",
        timeout_s=reading.seconds(hook, "timeout", 30),
        attempts_max=reading.whole(hook, "maxAttempts", 3),
    )


def _check_template(template: Node | None, trigger: Trigger, scope: Scope) -> None:
    # Here, because an HTTP client takes longer to import than most catalogs to check.
    from penstock.runtime.triggers import Webhooks

    if template is None or template.text is None:
        return
    try:
        Webhooks("", [trigger])
    except UserError as wrong:
        scope.sources.error(template, "E-WEBHOOK", f"{wrong.what}: {wrong.why}", hint=wrong.fix)
