"""The grammar of catalogs: every key, what it is for, and the form of its value.

`penstock.catalog.forms.check` checks these tables, `penstock schema` prints them for editors, and
`make docs` writes them to docs/catalog.md. No other place knows which keys exist.
"""

from __future__ import annotations

from penstock.catalog.forms import (
    AnyMapping,
    Anything,
    BooleanValue,
    Choice,
    Either,
    Form,
    Key,
    KeyedMapping,
    ListOf,
    MapOf,
    Null,
    SchemaMapping,
    Text,
    Unsupported,
    WholeNumber,
)
from penstock.catalog.rewrites import derive_instead, python_instead, transforms_instead
from penstock.journal.names import SEGMENT_BYTES_MAX

# --- words ---

_PART = r"(?!\.+(?:/|$))[\w\-.]+"  # a segment of dots alone would climb up a path

TEXT = Text()
FLAG = BooleanValue()
NAME = Text(
    expected='a name such as "acme/orders"',
    pattern=rf"{_PART}(/{_PART})*",
    code="E-NAME",
    hint="use letters, digits, - _ and ., in parts joined by /",
    path_bytes_max=SEGMENT_BYTES_MAX - len("name="),  # it is part of names of ops journals
)
PART = Text(
    expected='a name such as "fromOrders"',
    pattern=_PART,
    code="E-NAME",
    hint="use only letters, digits, - _ and .",
)
POINTER = Text(
    expected='a JSON pointer such as "/id"',
    pattern=r"(/([^~/]|~[01])*)+",
    hint="write /id for a member, and /address/city for a member of a member",
)
POINTERS = ListOf("a list of pointers", POINTER, at_least=1)
DURATION = Text(
    expected='a duration such as "30s" or "1h 30m"',
    pattern=r"\d+[smhd]( ?\d+[smhd])*",
    hint="units are s, m, h and d",
)
MOMENT = Text(
    expected='a time such as "2024-01-31T09:30:00Z"',
    pattern=r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    hint="RFC 3339: date, T, time, and Z or an offset",
)
BASE64 = Text(
    expected="base64 text",
    pattern=r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    hint="for example: openssl rand -base64 16",
)
INLINE_OR_FILE = Either("a mapping, or the path of a file that holds one", (TEXT, AnyMapping()))
SCHEMA_OR_FILE = Either("a mapping, or the path of a file that holds one", (TEXT, SchemaMapping()))
DEPTH = Either("true, false, or a depth as a number", (FLAG, WholeNumber()))


def _required(about: str, form: Form) -> Key:
    return Key(about, form, required=True)


def _no_effect(form: Form) -> Key:
    return Key("Accepted, without effect.", form, accepted=True)


def _unsupported(key: str, instead: str) -> Unsupported:
    return Unsupported("E-UNSUPPORTED", f'"{key}" is not supported', instead)


def _texts_by(what: str) -> MapOf:
    return MapOf(f"a mapping of {what} to strings", TEXT)


DELETE = Key("Remove it when the catalog is applied.", FLAG, default=False)
DISABLE = Key("Do not use it, but keep checking it.", FLAG, default=False)
BACKFILL = Key(
    "A counter; raising it reads the source again from its start.", WholeNumber(), default=0
)
PRIORITY = Key("Higher priorities are read first.", WholeNumber(), default=0)
RENAMED_FROM = "The task's former name: it continues from where that task was."
REDACT_SALT = Key("Salt for `redact: sha256`, in base64.", BASE64)
EXPECT_PUB_ID = _no_effect(Anything())
CONFIG = Key("The configuration, or a file that holds it.", INLINE_OR_FILE)

# --- shared by tasks ---

SHARDS = Key(
    "How the task runs.",
    KeyedMapping(
        "shards",
        {
            "disable": Key("Do not run the task; it is still checked.", FLAG, default=False),
            "minTxnDuration": Key(
                "Keep a transaction open at least this long.", DURATION, default="0s"
            ),
            "maxTxnDuration": Key(
                "Close a transaction after this long: 5m for materializations, 1s for others.",
                DURATION,
            ),
            "logLevel": Key(
                "The level of the task's log.",
                Choice(("error", "warn", "info", "debug", "trace")),
                default="info",
            ),
            "flags": Key(
                "Feature flags; those that there are hold for every task.",
                KeyedMapping(
                    "flags",
                    {
                        "enable-runtime-v2": Key("Run by the leader, as all tasks are.", TEXT),
                        "drop-runtime-v1-rollback": Key("Keep no state of another runtime.", TEXT),
                    },
                ),
            ),
            "count": Key("Number of shards that split the range of keys.", WholeNumber(1)),
            "hotStandbys": _no_effect(WholeNumber()),
            "ringBufferSize": _no_effect(WholeNumber()),
            "readChannelSize": _no_effect(WholeNumber()),
        },
    ),
)

_VALUES_BY_FIELD = MapOf(
    "a mapping of partition fields to lists of values", ListOf("a list of values", Anything())
)
PARTITIONS = KeyedMapping(
    "a partition selector",
    {
        "include": Key("Only documents whose field has one of these values.", _VALUES_BY_FIELD),
        "exclude": Key("No documents whose field has one of these values.", _VALUES_BY_FIELD),
    },
)
SOURCE = Either(
    "a collection name, or a mapping with name and partitions",
    (
        NAME,
        KeyedMapping(
            "a source",
            {
                "name": _required("The collection to read.", NAME),
                "partitions": Key("Which partitions to read.", PARTITIONS),
                "notBefore": Key("Skip documents published earlier.", MOMENT),
                "notAfter": Key("Skip documents published later.", MOMENT),
            },
        ),
    ),
)

CONNECTOR = KeyedMapping(
    "a connector",
    {
        "image": _required("The connector, such as penstock/materialize-sqlite.", TEXT),
        "config": CONFIG,
    },
)
LOCAL = KeyedMapping(
    "a local connector",
    {
        "command": _required(
            "The program to run.",
            ListOf("a list: the program and its arguments", TEXT, at_least=1),
        ),
        "config": CONFIG,
        "env": Key("Environment variables for the program.", _texts_by("variables")),
        "protobuf": Key("Use protobuf instead of JSON.", FLAG, default=False),
    },
)
_SPECIFICATION = KeyedMapping(
    "a specification", {"configSchema": Key("JSON Schema of the configuration.", SCHEMA_OR_FILE)}
)
PYTHON = KeyedMapping(
    "a Python module",
    {
        "module": _required("A .py file, or the code itself.", TEXT),
        "config": CONFIG,
        "spec": Key("Specification of the module.", _SPECIFICATION),
    },
)
_ENDPOINTS: dict[str, Key | Unsupported] = {
    "connector": Key("A connector, by its image.", CONNECTOR),
    "local": Key("A program on this machine.", LOCAL),
    "python": Key("A Python module beside the catalog.", PYTHON),
}

# --- collections and derivations ---

SQLITE = KeyedMapping(
    "using sqlite",
    {
        "migrations": Key(
            "SQL that creates the state. Only append to this list.",
            ListOf("a list of SQL blocks", TEXT),
        )
    },
)
SPARK = KeyedMapping(
    "using spark",
    {
        "views": Key("Constant tables that lambdas may join.", _texts_by("views")),
        "nonlinear": Key(
            "Allow results that depend on how documents are batched.",
            Choice(("deny", "allow")),
            default="deny",
        ),
    },
)
PYTHON_DERIVATION = KeyedMapping(
    "using python",
    {
        **PYTHON.keys,
        "module": Key("A .py file, or the code itself.", TEXT),
        "files": Key(
            "A project instead of a module: pyproject.toml, and the files of a package.",
            ListOf("a list of files", TEXT, at_least=1),
        ),
        "dependencies": Key(
            "Packages that the module imports.",
            Either(
                "a list of requirements, or a mapping of packages to versions",
                (ListOf("a list of requirements", TEXT), _texts_by("packages")),
            ),
        ),
        "batch": Key("Methods take and yield Arrow batches.", FLAG, default=False),
    },
    one_of=("module", "files"),
)
USING = KeyedMapping(
    "using",
    {
        "sqlite": Key("SQL in SQLite, run once per document.", SQLITE),
        "spark": Key("Spark SQL over whole batches.", SPARK),
        "python": Key("A Python module.", PYTHON_DERIVATION),
        "local": Key("A program on this machine.", LOCAL),
        "connector": Key("A connector, by its image.", CONNECTOR),
        "typescript": Unsupported(
            "E-TS", "typescript derivations are not supported", python_instead
        ),
    },
    one_of=("sqlite", "spark", "python", "local", "connector"),
)
SHUFFLE = Either(
    '"any", or a mapping with key',
    (
        Choice(("any",)),
        KeyedMapping(
            "a shuffle",
            {
                "key": _required("Locations in the source documents.", POINTERS),
                "lambda": Unsupported(
                    "E-SHUFFLE-LAMBDA",
                    "shuffling by a lambda is not supported",
                    "shuffle: {key: [/location, …]}",
                ),
            },
        ),
    ),
)
TRANSFORM = KeyedMapping(
    "a transform",
    {
        "name": _required("A transform with a new name starts over.", PART),
        "source": _required("The collection to read.", SOURCE),
        "shuffle": Key(
            "Which documents meet on one shard; by default, those of equal key.", SHUFFLE
        ),
        "lambda": Key("A .sql file, or the SQL itself.", TEXT),
        "readDelay": Key("Delay documents by this long.", DURATION, default="0s"),
        "priority": PRIORITY,
        "disable": DISABLE,
        "backfill": BACKFILL,
    },
)
DERIVE = KeyedMapping(
    "a derivation",
    {
        "using": _required("The engine, such as sqlite, spark or python.", USING),
        "transforms": _required(
            "Sources, and the code that runs on them. Their order breaks ties.",
            ListOf(
                "a list of transforms",
                TRANSFORM,
                at_least=1,
                hint="a derivation without a transform reads nothing: "
                "write - {name: fromOrders, source: acme/orders, …}",
            ),
        ),
        "transform": Unsupported(
            "E-OLD-DERIVE",
            '"transform" is an old form',
            transforms_instead,
        ),
        "shuffleKeyTypes": Key(
            "Types of the shuffle key, if they cannot be inferred.",
            ListOf("a list of types", Choice(("boolean", "integer", "string"))),
        ),
        "redactSalt": REDACT_SALT,
        "shards": SHARDS,
    },
)

PROJECTION = Either(
    "a JSON pointer, or a mapping with location",
    (
        POINTER,
        KeyedMapping(
            "a projection",
            {
                "location": _required("Location of the value.", POINTER),
                "partition": Key("Split the collection by this field.", FLAG, default=False),
            },
        ),
    ),
)
CODECS = ("NONE", "GZIP", "ZSTANDARD", "SNAPPY", "GZIP_OFFLOAD_DECOMPRESSION")
FRAGMENTS = KeyedMapping(
    "fragments",
    {
        "compressionCodec": Key("How files are compressed.", Choice(CODECS)),
        "length": Key("Target size of a file, in bytes.", WholeNumber(1)),
        "flushInterval": _unsupported(
            "flushInterval",
            "remove it: a transaction stores its documents when it commits, and none wait for a\n"
            "file to fill up. penstock compact joins small files",
        ),
        "retention": Key("Forget documents this long after they were committed.", DURATION),
    },
)
COLLECTION = KeyedMapping(
    "a collection",
    {
        "schema": Key("JSON Schema of the documents.", SCHEMA_OR_FILE),
        "writeSchema": Key("Schema of documents as written.", SCHEMA_OR_FILE),
        "readSchema": Key("Schema of documents as read.", SCHEMA_OR_FILE),
        "key": _required(
            "JSON pointers, as in key: [/id]. Documents of one key are reduced to one.", POINTERS
        ),
        "projections": Key(
            "Names for locations; partition: true splits the collection by one.",
            MapOf("a mapping of fields to locations", PROJECTION),
        ),
        "journals": Key(
            "How documents are stored.",
            KeyedMapping("journals", {"fragments": Key("The files of a journal.", FRAGMENTS)}),
        ),
        "derive": Key("Computes the collection from others.", DERIVE),
        "derivation": Unsupported("E-OLD-DERIVE", '"derivation" is an old form', derive_instead),
        "register": Unsupported(
            "E-OLD-DERIVE",
            '"register" is an old form',
            "keep state with using: sqlite (migrations) or using: python",
        ),
        "reset": _unsupported(
            "reset", "give the collection another name, and fill that from the start"
        ),
        "delete": DELETE,
        "expectPubId": EXPECT_PUB_ID,
    },
    together=(("writeSchema", "readSchema"),),
    exclusive=(("schema", "writeSchema"), ("schema", "readSchema")),
)

# --- captures and materializations ---

CAPTURE_BINDING = KeyedMapping(
    "a capture binding",
    {
        "resource": _required("The resource to read, as the connector defines it.", AnyMapping()),
        "target": _required("The collection to fill.", Either("a collection name", (NAME, Null()))),
        "onInvalid": Key(
            "How to handle documents that do not fit the schema.",
            Choice(("stop", "skip", "quarantine")),
            default="stop",
        ),
        "disable": DISABLE,
        "backfill": BACKFILL,
    },
)
CAPTURE = KeyedMapping(
    "a capture",
    {
        "endpoint": _required(
            "Where documents come from.",
            KeyedMapping(
                "an endpoint",
                {**_ENDPOINTS, "ingest": Key("Documents sent over HTTP.", AnyMapping())},
                one_of=("connector", "local", "python", "ingest"),
            ),
        ),
        "bindings": _required(
            "Which resource fills which collection.", ListOf("a list of bindings", CAPTURE_BINDING)
        ),
        "interval": Key("Time between starts, for connectors that end.", DURATION, default="5m"),
        "autoDiscover": _unsupported(
            "autoDiscover",
            "remove it, and list the bindings: penstock discover proposes those of new resources",
        ),
        "redactSalt": REDACT_SALT,
        "renamedFrom": Key(RENAMED_FROM, NAME),
        "shards": SHARDS,
        "delete": DELETE,
        "expectPubId": EXPECT_PUB_ID,
    },
)

ON_INCOMPATIBLE = Key(
    "What to do if a schema change does not fit the endpoint.",
    Choice(("abort", "backfill", "disableBinding", "disableTask")),
)
_FIELD_OPTIONS = MapOf(
    "a mapping of fields to options",
    Either("a mapping of options for the connector", (AnyMapping(), Null())),
)
_FIELD_NAMES = ListOf("a list of fields", TEXT)
FIELDS = KeyedMapping(
    "fields",
    {
        "recommended": Key(
            "Take the fields that the connector recommends, down to a depth.", DEPTH, default=True
        ),
        "require": Key("Required fields.", _FIELD_OPTIONS),
        "include": Key("The old name of require.", _FIELD_OPTIONS),
        "exclude": Key("Fields to leave out.", _FIELD_NAMES),
        "groupBy": Key("Fields to use as key.", _FIELD_NAMES),
    },
    exclusive=(("require", "include"),),
)
MATERIALIZATION_BINDING = KeyedMapping(
    "a materialization binding",
    {
        "resource": _required("The resource to write, as the connector defines it.", AnyMapping()),
        "source": _required("The collection to read.", SOURCE),
        "fields": Key("Which fields become columns.", FIELDS),
        "onIncompatibleSchemaChange": ON_INCOMPATIBLE,
        "atLeastOnce": _unsupported(
            "atLeastOnce", "remove it: every connector here stores each document exactly once"
        ),
        "priority": PRIORITY,
        "disable": DISABLE,
        "backfill": BACKFILL,
        "takeover": Key(
            "Take the resource from the task that fills it: it is filled again.",
            FLAG,
            default=False,
        ),
        "renamedFrom": Key(
            "The resource that the binding had before: it is renamed, and keeps its rows.",
            AnyMapping(),
        ),
    },
)
FOLLOWED_CAPTURE = Key(
    "A capture whose bindings to follow.",
    Either(
        "a capture name, or a mapping with capture",
        (
            NAME,
            KeyedMapping(
                "a followed capture",
                {
                    "capture": _required("The capture.", NAME),
                    "targetNaming": Key(
                        "How to name resources.",
                        Either("a naming strategy", (TEXT, AnyMapping())),
                    ),
                    "deltaUpdates": Key("Use delta updates in all bindings.", FLAG, default=False),
                    "fieldsRecommended": Key("Sets fields.recommended of every binding.", DEPTH),
                },
            ),
        ),
    ),
)
TRIGGER = KeyedMapping(
    "a trigger",
    {
        "url": _required("The URL to call.", TEXT),
        "method": Key("The HTTP method.", Choice(("POST", "PUT", "PATCH")), default="POST"),
        "headers": Key("Headers to send.", _texts_by("headers")),
        "payloadTemplate": _required("The body, with {{variables}}.", TEXT),
        "timeout": Key("Give up after this long.", DURATION, default="30s"),
        "maxAttempts": Key("Attempts per call.", WholeNumber(1), default=3),
    },
)
MATERIALIZATION = KeyedMapping(
    "a materialization",
    {
        "endpoint": _required(
            "Where documents go.",
            KeyedMapping(
                "an endpoint",
                {
                    **_ENDPOINTS,
                    "dekaf": Unsupported(
                        "E-DEKAF",
                        "dekaf endpoints are not supported",
                        'read the collection with Spark: spark.read.format("penstock")',
                    ),
                },
                one_of=("connector", "local", "python"),
            ),
        ),
        "source": FOLLOWED_CAPTURE,
        "sourceCapture": FOLLOWED_CAPTURE,
        "onIncompatibleSchemaChange": ON_INCOMPATIBLE,
        "bindings": Key(
            "Which collection fills which resource.",
            ListOf("a list of bindings", MATERIALIZATION_BINDING),
        ),
        "triggers": Key(
            "Webhooks to call after commits.",
            KeyedMapping(
                "triggers",
                {
                    "interval": _unsupported(
                        "interval",
                        "webhooks are called after every commit: shards: {minTxnDuration: 5m} "
                        "of the task\nleaves five minutes between two",
                    ),
                    "config": _required("The webhooks.", ListOf("a list of webhooks", TRIGGER)),
                },
            ),
        ),
        "renamedFrom": Key(RENAMED_FROM, NAME),
        "shards": SHARDS,
        "delete": DELETE,
        "expectPubId": EXPECT_PUB_ID,
    },
    exclusive=(("source", "sourceCapture"),),
)

# --- tests, and the whole ---

DOCUMENTS = _required(
    "The documents, or a file that holds them.",
    Either(
        "a list of documents, or the path of a file that holds one",
        (TEXT, ListOf("a list of documents", AnyMapping("a document, as a mapping"))),
    ),
)
DESCRIPTION = Key("A description.", TEXT)
INGEST = KeyedMapping(
    "an ingest step",
    {
        "collection": _required("The collection.", NAME),
        "documents": DOCUMENTS,
        "description": DESCRIPTION,
    },
)
VERIFY = KeyedMapping(
    "a verify step",
    {
        "collection": _required(
            "The collection, or {name, partitions}.",
            Either(
                "a collection name, or a mapping with name and partitions",
                (
                    NAME,
                    KeyedMapping(
                        "a collection",
                        {
                            "name": _required("The collection.", NAME),
                            "partitions": Key("Which partitions to compare.", PARTITIONS),
                        },
                    ),
                ),
            ),
        ),
        "documents": DOCUMENTS,
        "description": DESCRIPTION,
        "partitions": Key("Which partitions to compare.", PARTITIONS),
    },
)
SAMPLE = KeyedMapping(
    "a capture step",
    {
        "name": _required("The capture.", NAME),
        "sample": _required("A file with what a preview of the capture printed.", TEXT),
        "description": DESCRIPTION,
    },
)
STEP = KeyedMapping(
    "a step",
    {
        "capture": Key("Ingest what a capture gave when it was recorded.", SAMPLE),
        "ingest": Key("Append documents, as one transaction.", INGEST),
        "verify": Key("Compare all documents of a collection.", VERIFY),
    },
    one_of=("capture", "ingest", "verify"),
)
STEPS = ListOf("a list of steps", STEP)
TEST = Either(
    "a list of steps, or a mapping with steps",
    (
        STEPS,
        KeyedMapping(
            "a test",
            {
                "description": DESCRIPTION,
                "steps": _required("The steps, in order.", STEPS),
                "delete": DELETE,
                "expectPubId": EXPECT_PUB_ID,
            },
        ),
    ),
)

IMPORT = Either(
    "a path, or a mapping with url",
    (
        TEXT,
        KeyedMapping(
            "an import",
            {
                "url": _required("The file.", TEXT),
                "contentType": Key(
                    "The type of the file. Only catalogs are imported.",
                    Choice(("CATALOG", "JSON_SCHEMA", "CONFIG", "DOCUMENTS_FIXTURE")),
                ),
            },
        ),
    ),
)


def _old_section(key: str, instead: str) -> Unsupported:
    return Unsupported("E-OLD", f'"{key}" is an old section of catalogs', instead)


CATALOG = KeyedMapping(
    "a catalog",
    {
        "$schema": Key("For editors.", TEXT),
        "import": Key(
            "Other files of the catalog, relative to this one.", ListOf("a list of files", IMPORT)
        ),
        "collections": Key(
            "Keyed sets of documents.",
            MapOf("a mapping of collections by name", COLLECTION, names=NAME),
        ),
        "captures": Key(
            "Tasks that fill collections.",
            MapOf("a mapping of captures by name", CAPTURE, names=NAME),
        ),
        "materializations": Key(
            "Tasks that keep tables in other systems equal to collections.",
            MapOf("a mapping of materializations by name", MATERIALIZATION, names=NAME),
        ),
        "tests": Key(
            "Examples: the content of collections after given documents.",
            MapOf("a mapping of tests by name", TEST),
        ),
        "storageMappings": _unsupported(
            "storageMappings",
            "remove it: all collections are in the blob store of the deployment, as in\n"
            "penstock run --blob s3://bucket/prefix",
        ),
        "npmDependencies": _old_section(
            "npmDependencies", "remove it: derivations are written in SQL or Python"
        ),
        "resources": _old_section(
            "resources", "write the value, or the name of its file, where it is used"
        ),
        "endpoints": _old_section(
            "endpoints", "write each endpoint inside its capture or materialization"
        ),
    },
)
