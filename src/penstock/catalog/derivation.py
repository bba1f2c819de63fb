"""Build derivations: sources, shuffles, and checks of their code that need no run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import normpath
from typing import Literal, TypeAlias

from penstock.catalog import reading
from penstock.catalog.connectors import check_endpoint
from penstock.catalog.load import Code
from penstock.catalog.nodes import Node
from penstock.catalog.scope import Known, Scope, build_shards, build_source, check_key, key_type
from penstock.catalog.sqlite_lambdas import LambdaDatabase
from penstock.catalog.tasks import MAX_TXN_S, build_endpoint, never_runs
from penstock.model.json_order import ABSENT
from penstock.model.shape import locate
from penstock.model.spec import DerivationSpec, Source, Transform
from penstock.runtime.derive.mistakes import Mistake
from penstock.runtime.derive.python_code import check, code_of, find_class
from penstock.runtime.derive.python_names import method_name
from penstock.runtime.derive.sqlite_code import check_parameters

KeyType: TypeAlias = Literal["boolean", "integer", "string"]
Engine: TypeAlias = Literal["sqlite", "spark", "python", "local", "connector"]

_ENGINES: tuple[Engine, ...] = ("sqlite", "spark", "python", "local", "connector")
_KEY_TYPES: tuple[KeyType, ...] = ("boolean", "integer", "string")


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A transform while it is being built."""

    node: Node
    name: str
    source: Source | None
    known: Known | None
    shuffle: tuple[str, ...]
    code: Code | None

    @property
    def shuffles_any(self) -> bool:
        return self.node.text_of("shuffle") == "any"

    @property
    def key_types(self) -> tuple[KeyType, ...] | None:
        """The types of its shuffle key; None if they do not matter or are unknown."""
        if self.known is None or self.shuffles_any:
            return None
        found = [key_type(self.known.shape, pointer) for pointer in self.shuffle]
        types = tuple(t for f in found for t in _KEY_TYPES if t == f)
        return types if types and len(types) == len(found) else None


def build_derivation(
    node: Node,
    target: Known | None,
    scope: Scope,
    environ: Mapping[str, str] | None,
    *,
    deleted: bool = False,
) -> DerivationSpec | None:
    """Build the `derive` stanza of a collection; None if it names no supported engine.

    `target` is the collection, None if it could not be built; `deleted` if it is to be removed.
    """
    using = node.get("using")
    engine = next((e for e in _ENGINES if using and e in using.members), None)
    transforms_node = node.get("transforms")
    drafts = [
        _draft(item, engine, scope)
        for item in (transforms_node.items if transforms_node else ())
        if item.text_of("name") is not None
    ]
    _check_names(drafts, scope)
    key_types = _agreed_types(node.get("shuffleKeyTypes"), drafts, scope)
    disabled = never_runs(node) or deleted
    if not disabled:
        _check_enabled(transforms_node, scope)
    if engine in ("local", "connector"):
        check_endpoint("derivation", using, (), scope.sources, scope.connectors, disabled=disabled)
    if using is None or engine is None:
        return None
    inner = using.members[engine]
    migrations_node = inner.get("migrations")
    blocks = [scope.sources.code(m) for m in (migrations_node.items if migrations_node else ())]
    migrations = [block for block in blocks if block is not None]
    if engine == "sqlite":
        _check_sqlite(migrations, drafts, target, scope)
    elif engine == "spark":
        _check_spark(inner, drafts, target, scope)
    files = _project_files(inner, scope) if engine == "python" else {}
    if engine == "python":
        module = inner.get("module")
        code = scope.sources.code(module) if module else None
        _check_module(code, files, inner, drafts, node.get("shards"), scope)
    return DerivationSpec(
        using=engine,
        transforms=tuple(_transform(d, d.source) for d in drafts if d.source),
        shuffle_key_types=key_types,
        migrations=tuple(block.text for block in migrations),
        views=reading.text_pairs(inner.get("views")),
        nonlinear=inner.text_of("nonlinear") == "allow",
        endpoint=build_endpoint("derivation", using, scope, environ),
        files=tuple((path, file.text) for path, file in files.items()),
        dependencies=_dependencies(inner.get("dependencies")),
        batch=reading.flag(inner, "batch"),
        redact_salt=node.text_of("redactSalt"),
        shards=build_shards(node.get("shards"), scope, max_txn_s=MAX_TXN_S),
    )


def _draft(node: Node, engine: Engine | None, scope: Scope) -> _Draft:
    source, known = build_source(node.get("source"), scope)
    return _Draft(
        node=node,
        name=node.text_of("name") or "",
        source=source,
        known=known,
        shuffle=_shuffle(node, known, scope),
        code=_code(node, engine, scope),
    )


def _transform(draft: _Draft, source: Source) -> Transform:
    return Transform(
        name=draft.name,
        source=source,
        shuffle=draft.shuffle,
        shuffle_any=draft.shuffles_any,
        code=draft.code.text if draft.code else None,
        read_delay_s=reading.seconds(draft.node, "readDelay", 0),
        priority=reading.whole(draft.node, "priority", 0),
        disable=reading.flag(draft.node, "disable"),
        backfill=reading.whole(draft.node, "backfill", 0),
    )


def _check_enabled(transforms: Node | None, scope: Scope) -> None:
    """Warn of a derivation that reads nothing. One without any transform is a wrong form."""
    items = transforms.items if transforms else ()
    if transforms and items and all(reading.flag(item, "disable") for item in items):
        scope.sources.error(
            transforms,
            "W-DISABLED",
            "all transforms are disabled: the derivation runs, reads nothing and publishes nothing",
            hint="enable one, or disable the whole derivation with shards: {disable: true}",
            at=transforms.key_at,
        )


def _check_names(drafts: Sequence[_Draft], scope: Scope) -> None:
    first: dict[str, Node] = {}
    for draft in drafts:
        if draft.name in first:
            message = f'transform "{draft.name}" is defined twice'
            scope.sources.error(draft.node.members["name"], "E-DUP", message, see=first[draft.name])
        first.setdefault(draft.name, draft.node)


# --- shuffles ---


def _shuffle(transform: Node, known: Known | None, scope: Scope) -> tuple[str, ...]:
    shuffle = transform.get("shuffle")
    key = shuffle.get("key") if shuffle else None
    if key is None:
        return known.spec.key if known else ()
    pointers = [item for item in key.items if (item.text or "").startswith("/")]
    for item in pointers:
        if known:
            what, at = f"shuffle key {item.text}", item.text or ""
            check_key(item, what, at, known.shape, scope.sources, must_exist=False)
    return tuple(item.text or "" for item in pointers)


def _agreed_types(
    declared: Node | None, drafts: Sequence[_Draft], scope: Scope
) -> tuple[KeyType, ...]:
    """Return the shuffle key's types. All transforms must have the same: they share shards."""
    typed = [(draft, draft.key_types) for draft in drafts]
    known = [(draft, types) for draft, types in typed if types is not None]
    if declared is not None:
        agreed = tuple(t for text in reading.texts(declared) for t in _KEY_TYPES if t == text)
        wants, see = "shuffleKeyTypes is", declared
    elif known:
        first, agreed = known[0]
        wants, see = f"{first.name} shuffles on", first.node
    else:
        return ()
    for draft, types in known:
        if types != agreed:
            scope.sources.error(
                draft.node.get("shuffle") or draft.node,
                "E-SHUFFLE-TYPES",
                f"{wants} ({', '.join(agreed)}), but {draft.name} shuffles on ({', '.join(types)})",
                hint="give all transforms shuffle keys of the same types, or use shuffle: any",
                see=see,
            )
    return agreed


# --- code ---


def _code(transform: Node, engine: Engine | None, scope: Scope) -> Code | None:
    node = transform.get("lambda")
    if node is None:
        if engine in ("sqlite", "spark"):
            message = f'a transform using {engine} needs "lambda"'
            scope.sources.error(transform, "E-REQUIRED", message)
        return None
    if engine == "python":
        scope.sources.error(
            node,
            "E-KEY",
            '"lambda" cannot be used with using: python',
            hint="write a method of the module with the name of the transform",
        )
        return None
    code = scope.sources.code(node)
    if code is not None and not code.text.strip():
        scope.sources.error(node, "E-LAMBDA", "the lambda is empty", hint="write a query")
        return None
    return code


def _check_sqlite(
    migrations: Sequence[Code], drafts: Sequence[_Draft], target: Known | None, scope: Scope
) -> None:
    keyed = [at for at in target.spec.key if not _has_default(target, at)] if target else []
    database = LambdaDatabase()
    try:
        broken = [(block, database.migrate(block.text)) for block in migrations]
        for block, mistake in broken:
            _report(block, mistake, scope)
        for draft in drafts:
            if draft.code is None:
                continue
            fields = draft.known.spec.fields if draft.known else ()
            wrong = list(
                check_parameters(draft.code.text, fields, draft.known.spec.name)
                if draft.known
                else ()
            )
            for found in wrong:
                _report(draft.code, found, scope)
            if not any(mistake for _, mistake in broken):
                mistake = database.compile(draft.code.text)
                if mistake is None and draft.known is not None and not wrong:
                    mistake = database.check_key(draft.code.text, fields, keyed)
                _report(draft.code, mistake, scope)
    finally:
        database.close()


def _has_default(target: Known, location: str) -> bool:
    return locate(target.shape, location)[0].default is not ABSENT


def _check_spark(using: Node, drafts: Sequence[_Draft], target: Known | None, scope: Scope) -> None:
    """Judge views and lambdas by their text; Spark is not asked."""
    # Here, because sqlglot takes longer to import than most catalogs to check.
    from penstock.runtime.derive.spark_sql import check_views, judge_lambda

    views_node = using.get("views")
    named = {
        name: Code(node.text, node, around=scope.sources.lines(node))
        for name, node in (views_node.members.items() if views_node else ())
        if node.text is not None
    }
    views = {name: code.text for name, code in named.items()}
    for name, mistakes in check_views(views).items():
        for mistake in mistakes:
            _report(named[name], mistake, scope)
    for draft in drafts:
        if draft.code is None or draft.known is None or target is None:
            continue
        judged = judge_lambda(
            draft.code.text,
            source=draft.known.spec,
            target=target.spec,
            views=views,
            nonlinear=using.text_of("nonlinear") == "allow",
        )
        for mistake in judged if isinstance(judged, list) else ():
            _report(draft.code, mistake, scope)


def _project_files(python: Node, scope: Scope) -> dict[str, Code]:
    """Return the files of a project by their normal paths, without those that cannot be read."""
    listed = python.get("files")
    found = [(item, scope.sources.file(item)) for item in (listed.items if listed else ())]
    return {normpath(item.text or ""): file for item, file in found if file is not None}


def _dependencies(node: Node | None) -> tuple[str, ...]:
    """Return requirements, which are a list or a mapping of packages to versions."""
    pairs = reading.text_pairs(node)
    return reading.texts(node) or tuple(f"{name}{version.strip('*')}" for name, version in pairs)


def _check_module(
    module: Code | None,
    files: Mapping[str, Code],
    python: Node,
    drafts: Sequence[_Draft],
    shards: Node | None,
    scope: Scope,
) -> None:
    """Find mistakes in Python here, rather than in a worker, without running any of it."""
    listed = python.get("files")
    code = code_of(module.text if module else None, [(p, f.text) for p, f in files.items()])
    if code is None:
        if listed is not None and len(files) == len(listed.items):
            message = "no file is the __init__.py of a package"
            hint = "list the package of the class Derivation, as in name/__init__.py"
            scope.sources.error(listed, "E-LAMBDA", message, hint=hint)
        return
    methods: dict[str, str] = {}
    for draft in drafts:
        name = method_name(draft.name)
        if methods.setdefault(name, draft.name) != draft.name:
            message = f'transforms "{methods[name]}" and "{draft.name}" have one method, {name}'
            scope.sources.error(draft.node, "E-DUP", message, hint="rename one of them")
    found = find_class(code)
    count = shards.get("count") if shards else None
    if found and found.persists and count and isinstance(count.value, int) and count.value > 1:
        message = f"it keeps one state for all documents, and cannot have {count.value} shards"
        hint = "set count: 1, or keep state by key in self.keyed"
        scope.sources.error(count, "E-CANNOT-RUN", message, hint=hint)
    for file, mistake in check(code, [(draft, name) for name, draft in methods.items()]):
        text = module if file.path is None else files[file.path]
        if text is not None:
            _report(text, mistake, scope)


def _report(code: Code, mistake: Mistake | None, scope: Scope) -> None:
    if mistake is not None:
        scope.sources.error(
            code.node,
            mistake.code,
            mistake.message,
            hint=mistake.hint,
            at=code.position(mistake.offset),
        )
