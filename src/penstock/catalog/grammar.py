"""What people may write in a catalog.

The tables below are the grammar: every key, what it is for, and the kind of its value. They are
checked by `penstock.catalog.kinds.check`, printed for editors by `penstock check --print-schema`,
and are the only place that knows which keys exist.
"""

from __future__ import annotations

from penstock.catalog.kinds import (
    AnyMapping,
    Anything,
    Choice,
    Either,
    Flag,
    Key,
    Kind,
    ListOf,
    MapOf,
    Null,
    Record,
    Text,
    Unsupported,
    Whole,
)
from penstock.catalog.rewrites import derive_instead, python_instead
from penstock.journal.names import SEGMENT_BYTES_MAX

# --- words ---

_PART = r"(?!\.+(?:/|$))[\w\-.]+"  # a part of dots alone would climb in a path

TEXT = Text()
FLAG = Flag()
NAME = Text(
    expected='a name such as "acme/orders"',
    pattern=rf"{_PART}(/{_PART})*",
    code="E-NAME",
    hint="letters, digits, - _ . in parts that are joined by /",
    path_bytes_max=SEGMENT_BYTES_MAX - len("name="),  # tasks write about themselves by their names
)
PART = Text(
    expected='a name such as "fromOrders"',
    pattern=_PART,
    code="E-NAME",
    hint="letters, digits, - _ and . only",
)
POINTER = Text(
    expected='a JSON pointer such as "/id"',
    pattern=r"(/([^~/]|~[01])*)+",
    hint="the member id of a document is /id, and the member c of its member b is /b/c",
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
BASE64 = Text(expected="base64 text", pattern=r"[A-Za-z0-9+/]*={0,2}")
INLINE_OR_FILE = Either("a mapping, or the path of a file that holds one", (TEXT, AnyMapping()))
DEPTH = Either("true, false, or a depth as a number", (FLAG, Whole()))


def _required(about: str, kind: Kind) -> Key:
    return Key(about, kind, required=True)


def _no_effect(kind: Kind) -> Key:
    return Key("Kept, without an effect here.", kind, accepted=True)


def _texts_by(what: str) -> MapOf:
    return MapOf(f"a mapping of {what} to strings", TEXT)


DELETE = Key("Remove it when the catalog is applied.", FLAG)
DISABLE = Key("Leave it out, but keep checking it.", FLAG)
BACKFILL = Key("A counter; raising it reads the source again from its start.", Whole())
PRIORITY = Key("Higher ones are read first.", Whole())
REDACT_SALT = Key("Salt of `redact: sha256`, in base64.", BASE64)
EXPECT_PUB_ID = _no_effect(Anything())
CONFIG = Key("The configuration, or a file that holds it.", INLINE_OR_FILE)

# --- shared by tasks ---

SHARDS = Key(
    "How the task is run.",
    Record(
        "shards",
        {
            "disable": Key("Do not run the task; it is still checked.", FLAG),
            "minTxnDuration": Key("Keep a transaction open at least this long.", DURATION),
            "maxTxnDuration": Key("Close a transaction after this long.", DURATION),
            "logLevel": Key(
                "What the task logs.", Choice(("error", "warn", "info", "debug", "trace"))
            ),
            "flags": Key(
                "Switches.",
                Record(
                    "flags",
                    {
                        "enable-runtime-v2": Key("Run it by the leader, as all tasks are.", TEXT),
                        "drop-runtime-v1-rollback": Key("Keep nothing of another runtime.", TEXT),
                    },
                ),
            ),
            "count": Key("How many shards split the range of keys.", Whole(1)),
            "hotStandbys": _no_effect(Whole()),
            "ringBufferSize": _no_effect(Whole()),
            "readChannelSize": _no_effect(Whole()),
        },
    ),
)

_VALUES_BY_FIELD = MapOf(
    "a mapping of partition fields to lists of values", ListOf("a list of values", Anything())
)
PARTITIONS = Record(
    "a partition selector",
    {
        "include": Key("Only documents whose field is one of these.", _VALUES_BY_FIELD),
        "exclude": Key("No document whose field is one of these.", _VALUES_BY_FIELD),
    },
)
SOURCE = Either(
    "a collection name, or a mapping with name and partitions",
    (
        NAME,
        Record(
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

CONNECTOR = Record(
    "a connector",
    {
        "image": _required("Which connector, such as penstock/materialize-sqlite.", TEXT),
        "config": CONFIG,
    },
)
LOCAL = Record(
    "a local connector",
    {
        "command": _required(
            "The program to run.",
            ListOf("a list: the program and its arguments", TEXT, at_least=1),
        ),
        "config": CONFIG,
        "env": Key("Environment variables of the program.", _texts_by("variables")),
        "protobuf": Key("Speak protobuf rather than JSON.", FLAG),
    },
)
_SPECIFICATION = Record(
    "a specification", {"configSchema": Key("JSON Schema of the config.", INLINE_OR_FILE)}
)
PYTHON = Record(
    "a Python module",
    {
        "module": _required("A .py file, or the code itself.", TEXT),
        "config": CONFIG,
        "spec": Key("What the module says of itself.", _SPECIFICATION),
    },
)
_ENDPOINTS: dict[str, Key | Unsupported] = {
    "connector": Key("A connector by image.", CONNECTOR),
    "local": Key("A program on this machine.", LOCAL),
    "python": Key("A Python module beside the catalog.", PYTHON),
}

# --- collections and derivations ---

SQLITE = Record(
    "using sqlite",
    {
        "migrations": Key(
            "SQL that creates the state; only ever appended to.",
            ListOf("a list of SQL blocks", TEXT),
        )
    },
)
SPARK = Record(
    "using spark",
    {
        "views": Key("Constants that lambdas may join with.", _texts_by("views")),
        "nonlinear": Key(
            "Whether results may depend on how documents are batched.", Choice(("deny", "allow"))
        ),
    },
)
PYTHON_DERIVATION = Record(
    "using python",
    {
        **PYTHON.keys,
        "dependencies": Key(
            "Packages that the module imports.", ListOf("a list of requirements", TEXT)
        ),
        "batch": Key("Methods take and yield Arrow batches.", FLAG),
    },
)
USING = Record(
    "using",
    {
        "sqlite": Key("SQL that runs once per document, in SQLite.", SQLITE),
        "spark": Key("Spark SQL over whole batches.", SPARK),
        "python": Key("A Python module.", PYTHON_DERIVATION),
        "local": Key("A program on this machine.", LOCAL),
        "connector": Key("A connector by image.", CONNECTOR),
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
        Record(
            "a shuffle",
            {
                "key": _required("Locations of the source documents.", POINTERS),
                "lambda": Unsupported(
                    "E-SHUFFLE-LAMBDA",
                    "shuffling by a lambda is not supported",
                    "shuffle: {key: [/location, …]}",
                ),
            },
        ),
    ),
)
TRANSFORM = Record(
    "a transform",
    {
        "name": _required("Stable; a new name starts over.", PART),
        "source": _required("The collection to read.", SOURCE),
        "shuffle": Key("What meets on one shard; by default the source's key.", SHUFFLE),
        "lambda": Key("A .sql file, or the SQL itself.", TEXT),
        "readDelay": Key("Read documents this much later.", DURATION),
        "priority": PRIORITY,
        "disable": DISABLE,
        "backfill": BACKFILL,
    },
)
DERIVE = Record(
    "a derivation",
    {
        "using": _required("The language of the derivation: sqlite, spark or python.", USING),
        "transforms": _required(
            "What is read, and what is made of it. Their order breaks ties.",
            ListOf("a list of transforms", TRANSFORM),
        ),
        "transform": Unsupported(
            "E-OLD-DERIVE",
            '"transform" is the old form',
            "transforms: is a list, and each transform has a name",
        ),
        "shuffleKeyTypes": Key(
            "Types of the shuffle key, where they cannot be inferred.",
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
        Record(
            "a projection",
            {
                "location": _required("Where the value is.", POINTER),
                "partition": Key("Split the collection by this field.", FLAG),
            },
        ),
    ),
)
CODECS = ("NONE", "GZIP", "ZSTANDARD", "SNAPPY", "GZIP_OFFLOAD_DECOMPRESSION")
FRAGMENTS = Record(
    "fragments",
    {
        "compressionCodec": Key("How files are compressed.", Choice(CODECS)),
        "length": Key("Bytes that a file should reach.", Whole(1)),
        "flushInterval": Key("Write a file at least this often.", DURATION),
        "retention": Key("Drop files that are older.", DURATION),
    },
)
COLLECTION = Record(
    "a collection",
    {
        "schema": Key("JSON Schema of the documents.", INLINE_OR_FILE),
        "writeSchema": Key("Schema that written documents satisfy.", INLINE_OR_FILE),
        "readSchema": Key("Schema that readers see.", INLINE_OR_FILE),
        "key": _required(
            "JSON pointers, as in key: [/id]; documents of one key are reduced into one.", POINTERS
        ),
        "projections": Key(
            "Names for locations; partition: true splits the collection by one.",
            MapOf("a mapping of fields to locations", PROJECTION),
        ),
        "journals": Key(
            "How documents are stored.",
            Record("journals", {"fragments": Key("The files of a journal.", FRAGMENTS)}),
        ),
        "derive": Key("Computes the collection from others.", DERIVE),
        "derivation": Unsupported("E-OLD-DERIVE", '"derivation" is the old form', derive_instead),
        "register": Unsupported(
            "E-OLD-DERIVE",
            '"register" is the old form',
            "keep state in using: sqlite (migrations) or using: python",
        ),
        "reset": Key("Start over with new journals; readers backfill.", FLAG),
        "delete": DELETE,
        "expectPubId": EXPECT_PUB_ID,
    },
    together=(("writeSchema", "readSchema"),),
    exclusive=(("schema", "writeSchema"), ("schema", "readSchema")),
)

# --- captures and materializations ---

CAPTURE_BINDING = Record(
    "a capture binding",
    {
        "resource": _required("What to read, for the connector.", AnyMapping()),
        "target": _required("The collection to fill.", Either("a collection name", (NAME, Null()))),
        "onInvalid": Key(
            "What becomes of documents that do not fit the schema.", Choice(("fail", "reject"))
        ),
        "disable": DISABLE,
        "backfill": BACKFILL,
    },
)
AUTO_DISCOVER = Record(
    "autoDiscover",
    {
        "addNewBindings": Key("Bind what is new.", FLAG),
        "evolveIncompatibleCollections": Key("Start over where a change does not fit.", FLAG),
    },
)
CAPTURE = Record(
    "a capture",
    {
        "endpoint": _required(
            "Where documents come from.",
            Record(
                "an endpoint",
                {**_ENDPOINTS, "ingest": Key("Documents sent over HTTP.", AnyMapping())},
                one_of=("connector", "local", "python", "ingest"),
            ),
        ),
        "bindings": _required(
            "Which resource fills which collection.", ListOf("a list of bindings", CAPTURE_BINDING)
        ),
        "interval": Key("Start-to-start, for connectors that end.", DURATION),
        "autoDiscover": Key(
            "Look for new resources at start and every two hours.",
            Either("a mapping", (Null(), AUTO_DISCOVER)),
        ),
        "redactSalt": REDACT_SALT,
        "shards": SHARDS,
        "delete": DELETE,
        "expectPubId": EXPECT_PUB_ID,
    },
)

ON_INCOMPATIBLE = Key(
    "What to do when a schema change does not fit the endpoint.",
    Choice(("abort", "backfill", "disableBinding", "disableTask")),
)
_FIELD_OPTIONS = MapOf(
    "a mapping of fields to options",
    Either("a mapping of options for the connector", (AnyMapping(), Null())),
)
_FIELD_NAMES = ListOf("a list of fields", TEXT)
FIELDS = Record(
    "fields",
    {
        "recommended": Key("Take what the connector recommends, down to a depth.", DEPTH),
        "require": Key("Fields that must be there.", _FIELD_OPTIONS),
        "include": Key("The older name of require.", _FIELD_OPTIONS),
        "exclude": Key("Fields to leave out.", _FIELD_NAMES),
        "groupBy": Key("Fields that replace the key.", _FIELD_NAMES),
    },
    exclusive=(("require", "include"),),
)
MATERIALIZATION_BINDING = Record(
    "a materialization binding",
    {
        "resource": _required("Where to write, for the connector.", AnyMapping()),
        "source": _required("The collection to read.", SOURCE),
        "fields": Key("Which fields become columns.", FIELDS),
        "onIncompatibleSchemaChange": ON_INCOMPATIBLE,
        "atLeastOnce": Key(
            "Accept an endpoint that may see a document twice.", Choice(("accept",))
        ),
        "priority": PRIORITY,
        "disable": DISABLE,
        "backfill": BACKFILL,
        "takeover": Key(
            "Take the resource from the task that fills it: it is emptied, and filled anew.", FLAG
        ),
    },
)
FOLLOWED_CAPTURE = Key(
    "A capture whose bindings are followed.",
    Either(
        "a capture name, or a mapping with capture",
        (
            NAME,
            Record(
                "a followed capture",
                {
                    "capture": _required("The capture.", NAME),
                    "targetNaming": Key(
                        "How resources are named.",
                        Either("a naming strategy", (TEXT, AnyMapping())),
                    ),
                    "deltaUpdates": Key("Whether bindings use delta updates.", FLAG),
                    "fieldsRecommended": Key("As fields.recommended of every binding.", DEPTH),
                },
            ),
        ),
    ),
)
TRIGGER = Record(
    "a trigger",
    {
        "url": _required("Where to call.", TEXT),
        "method": Key("How to call.", Choice(("POST", "PUT", "PATCH"))),
        "headers": Key("Headers to send.", _texts_by("headers")),
        "payloadTemplate": _required("The body, with {{variables}}.", TEXT),
        "timeout": Key("Give up after this long.", DURATION),
        "maxAttempts": Key("Tries per call.", Whole(1)),
    },
)
MATERIALIZATION = Record(
    "a materialization",
    {
        "endpoint": _required(
            "Where documents go to.",
            Record(
                "an endpoint",
                {
                    **_ENDPOINTS,
                    "dekaf": Unsupported(
                        "E-DEKAF",
                        "dekaf endpoints are not supported",
                        "read the collection with Spark: format penstock",
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
            "Web hooks to call after commits.",
            Record(
                "triggers",
                {
                    "interval": Key("Call at most this often.", DURATION),
                    "config": _required("The hooks.", ListOf("a list of hooks", TRIGGER)),
                },
            ),
        ),
        "renamedFrom": Key("What the task was called before: it goes on where that one was.", NAME),
        "shards": SHARDS,
        "delete": DELETE,
        "expectPubId": EXPECT_PUB_ID,
    },
    exclusive=(("source", "sourceCapture"),),
)

# --- tests, storage, and the whole ---

DOCUMENTS = _required(
    "The documents, or a file that holds them.",
    Either(
        "a list of documents, or the path of a file that holds one",
        (TEXT, ListOf("a list of documents", AnyMapping("a document, as a mapping"))),
    ),
)
DESCRIPTION = Key("For people.", TEXT)
INGEST = Record(
    "an ingest step",
    {
        "collection": _required("The collection.", NAME),
        "documents": DOCUMENTS,
        "description": DESCRIPTION,
    },
)
VERIFY = Record(
    "a verify step",
    {
        "collection": _required("The collection, or {name, partitions}.", SOURCE),
        "documents": DOCUMENTS,
        "description": DESCRIPTION,
        "partitions": Key("Which partitions to compare.", PARTITIONS),
    },
)
STEP = Record(
    "a step",
    {
        "ingest": Key("Append documents, as one transaction.", INGEST),
        "verify": Key("Compare all documents of a collection.", VERIFY),
    },
    one_of=("ingest", "verify"),
)
STEPS = ListOf("a list of steps", STEP)
TEST = Either(
    "a list of steps, or a mapping with steps",
    (
        STEPS,
        Record(
            "a test",
            {
                "description": DESCRIPTION,
                "steps": _required("What happens, in order.", STEPS),
                "delete": DELETE,
                "expectPubId": EXPECT_PUB_ID,
            },
        ),
    ),
)

STORE = Record(
    "a store",
    {
        "provider": _required("What kind of store.", Choice(("S3", "GCS", "AZURE", "LOCAL"))),
        "bucket": Key("Its bucket or container.", TEXT),
        "prefix": Key("A path inside of it.", TEXT),
        "path": Key("The directory, of a LOCAL store.", TEXT),
    },
)
STORAGE = Record(
    "a storage mapping",
    {
        "stores": _required(
            "The first is written, all are read.", ListOf("a list of stores", STORE, at_least=1)
        )
    },
)
STORAGE_PREFIX = Text(
    expected='a prefix such as "acme/", with a slash at its end',
    pattern=rf"({_PART}/)+",
    code="E-NAME",
)

IMPORT = Either(
    "a path, or a mapping with url",
    (
        TEXT,
        Record(
            "an import",
            {
                "url": _required("The file.", TEXT),
                "contentType": Key(
                    "What the file is; an import loads catalogs only.",
                    Choice(("CATALOG", "JSON_SCHEMA", "CONFIG", "DOCUMENTS_FIXTURE")),
                ),
            },
        ),
    ),
)


def _of_years_past(key: str, instead: str) -> Unsupported:
    return Unsupported("E-OLD", f'"{key}" is of a layout of years past', instead)


CATALOG = Record(
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
            "Fill collections.", MapOf("a mapping of captures by name", CAPTURE, names=NAME)
        ),
        "materializations": Key(
            "Keep tables at other systems equal to collections.",
            MapOf("a mapping of materializations by name", MATERIALIZATION, names=NAME),
        ),
        "tests": Key(
            "Examples of what collections hold after given documents.",
            MapOf("a mapping of tests by name", TEST),
        ),
        "storageMappings": Key(
            "Where collections are stored, by prefix of their names.",
            MapOf("a mapping of prefixes to stores", STORAGE, names=STORAGE_PREFIX),
        ),
        "npmDependencies": _of_years_past(
            "npmDependencies", "remove it: derivations are written in SQL or Python"
        ),
        "resources": _of_years_past(
            "resources", "write the value where it is used, or name its file there"
        ),
        "endpoints": _of_years_past(
            "endpoints", "write each endpoint inside its capture or materialization"
        ),
    },
)
