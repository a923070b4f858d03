"""Hostile PyTorch files written by hand: pickles opcode by opcode, and zip files field by field."""

import io
import struct
import warnings
import zipfile
from collections.abc import Iterator

# Calling any of these does harm, or may in a longer chain. Each is requested in several ways.
GADGETS = (
    "os.system posix.system nt.system os.popen os.execv os.remove os.putenv subprocess.Popen "
    "subprocess.call subprocess.check_output builtins.eval builtins.exec builtins.compile "
    "builtins.open builtins.getattr builtins.setattr builtins.__import__ builtins.map "
    "builtins.apply __builtin__.eval builtins.globals builtins.type builtins.object builtins.list "
    "builtins.dict builtins.frozenset builtins.range builtins.memoryview "
    "importlib.import_module runpy.run_path runpy._run_code code.interact pdb.run timeit.timeit "
    "operator.attrgetter operator.methodcaller functools.partial types.FunctionType "
    "types.CodeType pickle.loads _pickle.loads pickle.Unpickler marshal.loads shelve.open "
    "codecs.decode copyreg._reconstructor copyreg.__newobj__ shutil.rmtree socket.socket "
    "webbrowser.open pty.spawn ctypes.CDLL asyncio.run sys.exit numpy.load numpy.ndarray "
    "numpy.core.multiarray._reconstruct numpy.core.multiarray.scalar "
    "numpy.f2py.crackfortran.myeval torch.load torch.hub.load torch.storage._load_from_bytes "
    "torch.serialization.load torch.jit.load torch.Tensor torch.nn.Module "
    "torch._utils._rebuild_sparse_tensor torch._utils._rebuild_qtensor "
    "torch._utils._rebuild_meta_tensor_no_storage torch.QInt8Storage "
    "torch._utils._rebuild_wrapper_subclass torch._utils._rebuild_nested_tensor "
    "torch._utils._rebuild_device_tensor_from_numpy torch.complex32 "
    "torch._tensor._rebuild_from_type_v2 torch._utils._rebuild_parameter_with_state "
    "torch.nn.modules.linear.Linear argparse.Namespace collections.defaultdict collections.deque "
    "collections.OrderedDict.fromkeys collections.namedtuple "
    "jax_transformer.storage.pt.writer.write"
).split()


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def number(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(*values: int) -> bytes:
    return tuple_of(*map(number, values))


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + tuple_of(*arguments) + b"R"


def storage(
    key: str = "0",
    kind: bytes = name("torch", "FloatStorage"),
    size: bytes = number(4),
    device: bytes = text("cpu"),
) -> bytes:
    return tuple_of(text("storage"), kind, text(key), device, size) + b"Q"


HOOKS = name("collections", "OrderedDict") + b")R"
V2, V3 = name("torch._utils", "_rebuild_tensor_v2"), name("torch._utils", "_rebuild_tensor_v3")


def tensor(
    stored: bytes = storage(),
    offset: bytes = number(0),
    shape: bytes = numbers(4),
    stride: bytes = numbers(1),
    rest: tuple[bytes, ...] = (b"\x89", HOOKS),
    function: bytes = V2,
) -> bytes:
    return call(function, stored, offset, shape, stride, *rest)


def pickle(body: bytes, protocol: int = 2) -> bytes:
    return bytes([0x80, protocol]) + body + b"."


def typed(stored: bytes, dtype: bytes, shape: bytes = numbers(4)) -> bytes:
    """Return a tensor whose dtype is named next to its storage."""
    return tensor(stored, shape=shape, rest=(b"\x89", HOOKS, dtype), function=V3)


Members = list[tuple[str, bytes]]


def members(content: bytes, data: bytes = b"\0" * 16) -> Members:
    files = [("a/data.pkl", content), ("a/byteorder", b"little"), ("a/data/0", data)]
    return [*files, ("a/version", b"3\n")]


def zipped(contents: Members, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as archive:
        warnings.simplefilter("ignore")  # about members with the same name
        for member, content in contents:
            archive.writestr(zipfile.ZipInfo(member), content, method)
    return buffer.getvalue()


def file(body: bytes, protocol: int = 2) -> bytes:
    """Return a complete file with this pickle and one storage of four float32."""
    return zipped(members(pickle(body, protocol)))


def gadgets(sentinel: str) -> Iterator[tuple[str, bytes]]:
    """Yield every gadget: called, requested in protocols 2 and 4, instantiated, and only named."""
    order = text(f"touch {sentinel}")
    for full in GADGETS:
        module, _, attribute = full.rpartition(".")
        yield f"{full} called", file(call(name(module, attribute), order))
        called = short(module) + short(attribute) + b"\x93" + tuple_of(order) + b"R"
        yield f"{full} called in protocol 4", file(called, 4)
        yield f"{full} as a value", file(b"}" + text("weight") + name(module, attribute) + b"s")
        yield f"{full} made an object of", file(name(module, attribute) + tuple_of(order) + b"\x81")
    for instruction, body in {
        "INST": b"(" + order + b"ios\nsystem\n",
        "OBJ": b"(" + name("os", "system") + order + b"o",
        "NEWOBJ_EX": name("os", "system") + tuple_of(order) + b"}\x92",
    }.items():
        yield instruction, file(body)
    inner = pickle(call(name("os", "system"), order))
    within = call(name("pickle", "loads"), b"B" + struct.pack("<I", len(inner)) + inner)
    yield "a pickle within a pickle", file(within)
    yield "a second pickle behind the first", zipped(members(pickle(b"}") + inner))
    dots = name("collections", "OrderedDict.__init__.__globals__")
    yield "a name with dots", file(call(dots, order))
    yield "a name of two modules", file(call(name("torch._utils.os", "system"), order))
    yield "a known name's method", file(call(name("torch", "FloatStorage.from_file"), order))


MACHINE = {
    **dict(EXT1=b"\x82\x01", EXT2=b"\x83\x01\x00", EXT4=b"\x84\x01\x00\x00\x00"),
    **dict(PERSID=b"P0\n", NEXT_BUFFER=b"\x97", READONLY_BUFFER=b"}\x98"),
    **dict(POP=b"}}0", POP_MARK=b"}(1", DUP=b"}2", EMPTY_SET=b"\x8f", FROZENSET=b"(\x91"),
    **dict(INT=b"I1\n", LONG=b"L1L\n", FLOAT=b"F1\n", STRING=b"S'a'\n", UNICODE=b"Va\n"),
    **dict(GET=b"}p0\ng0\n", DICT=b"(d", LIST=b"(l"),
    "no instruction": b"\xff",
    "a second PROTO": b"\x80\x02}",
    "attributes of a dict": b"}}" + text("__class__") + b"Nsb",
    "attributes of a list": b"]}b",
    "attributes of a tensor": tensor() + b"}" + text("grad") + b"Nsb",
    "attributes of a function": V2 + b"}" + text("name") + text("x") + b"sb",
    "attributes that are a tuple": b"}}" + b"}" + b"\x86b",
    "a function as a value": V2,
    "a storage's kind as a value": name("torch", "FloatStorage"),
    "a call of a dtype": call(name("torch", "float32"), number(1)),
    "a call of a dict": call(b"}", number(1)),
    "a call of a tensor": call(tensor(), number(1)),
    "a call without a tuple": V2 + b"]R",
    "a call of nothing": b")R",
    "a name that is a number": number(1) + number(2) + b"\x93",
    "a name that is a list": b"]]\x93",
    "one number for two values": b"]q\x00]q\x00a",
    "MEMOIZE onto a number": b"]q\x01]\x94a",
    "a value that was never remembered": b"h\x07",
    "a far number that was never remembered": b"j\xff\xff\xff\xff",
    "remembering nothing": b"q\x00",
    "APPEND to a dict": b"}Na",
    "APPENDS to a tuple": b")(NNe",
    "APPENDS to a tensor": tensor() + b"(NNe",
    "SETITEM of a list": b"]NNs",
    "SETITEM of a tensor": tensor() + number(0) + number(1) + b"s",
    "a key that is a list": b"}]Ns",
    "a key that is a dict": b"}}Ns",
    "a key that is a tuple": b"})Ns",
    "a key that is a tensor": b"}" + tensor() + b"Ns",
    "a key that is a huge integer": b"}" + number(2**100) + b"Ns",
    "a key twice": b"}(" + text("a") + number(1) + text("a") + number(2) + b"u",
    "a key twice in two instructions": b"}" + 2 * (text("a") + number(1) + b"s"),
    "a key of escape codes": b"}" + text("\x1b[2Jweight") + b"Ns",
    "a key of two lines": b"}" + text("a\nb") + b"Ns",
    "a key without a value": b"}(Nu",
    "marks that nothing ends": b"((((}",
    "an end without a mark": b"t",
    "two results": b"}}",
    "no result": b"",
    "a tuple of too few": b"N\x87",
    "text that is no UTF-8": b"X\x02\x00\x00\x00\xff\xfe",
    "half a character": b"X\x03\x00\x00\x00\xed\xa0\x80",
    "a name that is no UTF-8": b"c\xff\xff\n\xff\n",
    "a name without an end": b"c" + b"a" * 5000,
    "Python 2's text that is no UTF-8": b"U\x01\xff",
}


def protocols() -> Iterator[tuple[str, bytes]]:
    for protocol in (0, 1, 6, 100, 255):
        yield f"protocol {protocol}", file(b"}", protocol)
    for what, content in {
        "an empty pickle": b"",
        "no protocol": b"}.",
        "no end": b"\x80\x02}",
        "no instruction at all": b"\x80\x02",
        "something behind the end": pickle(b"}") + b"}",
        "a cut frame": b"\x80\x04\x95\x05\x00",
    }.items():
        yield what, zipped(members(content))


def bombs() -> Iterator[tuple[str, bytes]]:
    """Yield files that are small on disk and large if their numbers are believed."""
    huge = struct.pack("<Q", 2**62)
    for what, body in {
        "LONG4 of 2 GB": b"\x8b\xff\xff\xff\x7f",
        "LONG4 of less than nothing": b"\x8b\xff\xff\xff\xff",
        "LONG4 of 100 kB": b"\x8b" + struct.pack("<I", 100_000) + b"\x7f" * 100_000,
        "LONG4 of 300 bytes": b"\x8b" + struct.pack("<I", 300) + b"\x7f" * 300,
        "text of 4 GB": b"X\xff\xff\xff\xffa",
        "text of 2**62 bytes": b"\x8d" + huge,
        "bytes of 4 GB": b"B\xff\xff\xff\xff",
        "bytes of 2**62": b"\x8e" + huge,
        "a bytearray of 2**62": b"\x96" + huge,
        "Python 2's text of 4 GB": b"T\xff\xff\xff\xff",
        "bytes made of a number": call(name("builtins", "bytes"), number(10**12)),
        "a bytearray made of a number": call(name("builtins", "bytearray"), number(10**12)),
        "a bytearray made of a list": call(name("builtins", "bytearray"), b"]"),
        "bytes that are unpacked": call(name("_codecs", "encode"), text("x"), text("zlib")),
        "bytes beyond latin1": call(name("_codecs", "encode"), text("\u0100"), text("latin1")),
        "a complex number of text": call(name("builtins", "complex"), text("1" * 100_000)),
        "a set of text": call(name("builtins", "set"), text("x" * 1000)),
        "a Counter of text": call(name("collections", "Counter"), text("x" * 1000)),
        "an OrderedDict of pairs": call(name("collections", "OrderedDict"), b"]"),
        "a torch.Size of text": call(name("torch", "Size"), tuple_of(text("a"))),
        "a device of nothing": call(name("torch", "device")),
        "lists within lists": b"]" * 30_000 + b"a" * 29_999,
        "tuples within tuples": b")" + b"\x85" * 30_000,
        "dicts within dicts": (b"}" + text("a")) * 20_000 + b"N" + b"s" * 20_000,
        "lists within lists, just too deep": b"]" * 102 + b"a" * 101,
        "nothing but marks": b"(" * 200_000 + b"}",
        "nothing but dicts": b"}" * 200_000,
        "a list in itself": b"]q\x00h\x00a",
        "a dict in itself": b"}q\x00" + text("a") + b"h\x00s",
        "a list in a tuple in itself": b"]q\x00h\x00\x85a",
    }.items():
        yield what, file(body)
    for kind, (begin, end) in {"lists": (b"](", b"e"), "tuples": (b"(", b"t")}.items():
        body = begin + b"N" * 10 + end + b"q\x00"
        for level in range(1, 30):
            body += begin + (b"h" + bytes([level - 1])) * 10 + end + b"q" + bytes([level])
        yield f"10**30 values by {kind}", file(b"(" + body + b"t")
    body = b"}" + text("a") + b"Nsq\x00"
    for level in range(1, 40):
        before = b"h" + bytes([level - 1])
        body += b"}(" + text("a") + before + text("b") + before + b"uq" + bytes([level])
    yield "2**40 values by dicts", file(b"(" + body + b"t")


def lies() -> Iterator[tuple[str, bytes]]:
    """Yield storages and tensors with false sizes, types or names; the storage has 16 bytes."""
    double = name("torch", "DoubleStorage")
    untyped = name("torch.storage", "UntypedStorage")
    uint16 = name("torch", "uint16")
    fields = (name("torch", "FloatStorage"), text("0"), text("cpu"), number(4))
    sixteen = storage(kind=untyped, size=number(16))
    parameter = name("torch._utils", "_rebuild_parameter")
    for size in (2**60, 2**40, 5, 3, 0, -1, -(2**62), 2**63, 2**100):
        yield f"a storage of {size}", file(tensor(storage(size=number(size)), shape=numbers(1)))
    for what, stored in {
        "a storage of another width": storage(kind=double),
        "a storage that is not there": storage("7"),
        "a storage outside": storage("../data.pkl"),
        "a storage by an absolute name": storage("/etc/passwd"),
        "a storage without a name": storage(""),
        "a storage whose size is true": storage(size=b"\x88"),
        "a storage whose size is text": storage(size=text("4")),
        "a storage whose device is a number": storage(device=number(1)),
        "a storage of a dtype": storage(kind=name("torch", "float32")),
        "a storage of a function": storage(kind=V2),
        "a storage of text": storage(kind=text("FloatStorage")),
        "a module": tuple_of(text("module"), *fields) + b"Q",
        "a reference of text": text("storage") + b"Q",
        "a reference of nothing": b")Q",
        "a reference of a list": b"]Q",
        "a storage with a view": tuple_of(text("storage"), *fields, b"N") + b"Q",
        "a tensor in place of a storage": tensor(),
        "nothing in place of a storage": b"N",
        "an untyped storage without a dtype": sixteen,
    }.items():
        yield what, file(tensor(stored))
    for shape, stride, offset in (
        *(((5,), (1,), 0), ((4,), (1,), 1), ((4,), (2,), 0), ((1,), (1,), 4), ((-1,), (1,), 0)),
        *(((4,), (-1,), 3), ((4,), (1,), -1), ((0,), (1,), -1), ((0,), (1,), 5)),
        *(((1000,), (0,), 0), ((2**38,), (0,), 0), ((2**63,), (0,), 0)),
        *(((2**62,), (1,), 0), ((2**64,), (1,), 0), ((1,), (1,), 2**62)),
        *(((2, 2), (1,), 0), ((4,), (1, 1), 0), ((3, 3), (2, 1), 0), ((100_000, 4), (0, 1), 0)),
        *(((2**32, 2**32), (0, 0), 0), ((0, 2**62), (1, 1), 0)),
        *(((0, 2**62, 2**62), (0, 0, 0), 0), ((1,) * 65, (1,) * 65, 0)),
    ):
        body = tensor(offset=number(offset), shape=numbers(*shape), stride=numbers(*stride))
        yield f"shape {shape}, stride {stride}, offset {offset}"[:80], file(body)
    for what, body in {
        "a shape that is a list": tensor(shape=b"]"),
        "a shape of text": tensor(shape=tuple_of(text("4"))),
        "a shape of truth": tensor(shape=tuple_of(b"\x88")),
        "a shape of floats": tensor(shape=tuple_of(b"G" + struct.pack(">d", 4.0))),
        "an offset of text": tensor(offset=text("0")),
        "an offset of nothing": tensor(offset=b"N"),
        "too few arguments": call(V2, storage(), number(0)),
        "too many arguments": tensor(rest=(b"\x89", HOOKS, b"N", b"N", b"N")),
        "hooks": tensor(rest=(b"\x89", b"}" + number(1) + number(2) + b"s")),
        "a gradient that is a tensor": tensor(rest=(tensor(), HOOKS)),
        "numbers to be negated": tensor(rest=(b"\x89", HOOKS, b"}" + text("neg") + b"\x88s")),
        "numbers to be conjugated": tensor(rest=(b"\x89", HOOKS, b"}" + text("conj") + b"\x88s")),
        "a dtype that is text": typed(sixteen, text("uint16")),
        "a dtype that is a storage": typed(sixteen, double),
        "a dtype and a typed storage": typed(storage(), uint16),
        "more of a dtype than there is": typed(sixteen, uint16, shape=numbers(9)),
        "a parameter of a dict": call(parameter, b"}", b"\x88", HOOKS),
        "a parameter with hooks": call(parameter, tensor(), b"\x88", b"]"),
        "a parameter of two": call(parameter, tensor(), b"\x88"),
        "truth that is 255": tensor(
            storage(kind=name("torch", "BoolStorage"), size=number(16)), shape=numbers(16)
        ),
    }.items():
        yield what, zipped(members(pickle(body), b"\xff" * 16))
    many = b"".join(
        tensor(shape=numbers(3), stride=numbers(0), offset=number(0))
        + tensor(shape=numbers(n, 2), stride=numbers(0, 1))
        for n in range(300)
    )
    yield "many tensors of one storage", file(b"](" + many + b"e")
