//! Encodings and hashes as Python 3.11's pickle, cbor2 6.3 and xxhash 4.1 make them of the same values.

use super::*;

const INTS: [i64; 18] = [
    0,
    23,
    24,
    255,
    256,
    65535,
    65536,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    i64::MAX,
    -1,
    -24,
    -25,
    -(1 << 31),
    -(1 << 31) - 1,
    -(1 << 39),
    i64::MIN,
];

const PARENT_HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

fn parent() -> BlockHash {
    let bytes: Vec<u8> = (0..32).collect();
    BlockHash::new(&bytes).expect("32 bytes")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
}

fn encoding<E: Encoder>(parent: BlockHash, tokens: &[i64], extra: Option<(&ExtraKeys, KeyId)>) -> String {
    let parent_object = extra.and_then(|(keys, _)| keys.parent());
    let mut encoder = E::default();
    // What the buffer held before must not matter.
    encoder.text("something longer than a header");
    hex(encoder.block(&BlockInput { parent, parent_object, tokens, extra }).expect("short enough"))
}

/// The hash of one block of tokens with one tuple of extra keys.
fn hash_with(algo: HashAlgo, tokens: &[i64], build: impl Fn(&mut ExtraKeys) -> Result<Vec<KeyId>>) -> Result<String> {
    let mut keys = ExtraKeys::new();
    let items = build(&mut keys)?;
    let tuple = keys.add_tuple(&items)?;
    keys.push_block(Some(tuple))?;
    let hashes = hash_blocks(algo, tokens, tokens.len(), parent(), Some(&keys))?;
    Ok(hex(hashes[0].as_bytes()))
}

#[test]
fn integers_of_every_width() {
    let pickle = "284b004b174b184bff4d00014dffff4a000001004affffff7f8a0500000080008a0500000000018a08ffffffffffffff7f\
                  4affffffff4ae8ffffff4ae7ffffff4a000000808a05ffffff7fff8a0500000000808a0800000000000000807494";
    let wanted = format!("80059586000000000000004320{PARENT_HEX}94{pickle}4e87942e");
    assert_eq!(encoding::<Pickler>(parent(), &INTS, None), wanted);
    let cbor = "9200171818\
                18ff19010019ffff1a000100001a7fffffff1a800000001b00000001000000001b7fffffffffffffff203738183a7fffffff\
                3a800000003b0000007fffffffff3b7fffffffffffffff";
    assert_eq!(encoding::<CborWriter>(parent(), &INTS, None), format!("835820{PARENT_HEX}{cbor}f6"));
}

#[test]
fn short_tuples_and_short_parents() -> Result<()> {
    let parent = BlockHash::new(&parent().as_bytes()[..16])?;
    let start = format!("4310{}94", &PARENT_HEX[..32]);
    let wanted = |frame: &str, tokens: &str| format!("800595{frame}00000000000000{start}{tokens}944e87942e");
    assert_eq!(encoding::<Pickler>(parent, &[0], None), wanted("1b", "4b0085"));
    assert_eq!(encoding::<Pickler>(parent, &[0, 1], None), wanted("1d", "4b004b0186"));
    assert_eq!(encoding::<Pickler>(parent, &[0, 1, 2], None), wanted("1f", "4b004b014b0287"));
    Ok(())
}

#[test]
fn identity_is_followed() -> Result<()> {
    let mut keys = ExtraKeys::new();
    let the_parent = keys.add_parent(&parent())?;
    let (a, twin, one, empty) = (keys.add_str("ab")?, keys.add_str("ab")?, keys.add_int(1)?, keys.add_tuple(&[])?);
    let pair = keys.add_tuple(&[a, one])?;
    let (none, yes, no, half) = (keys.add_none()?, keys.add_bool(true)?, keys.add_bool(false)?, keys.add_float(0.5)?);
    let tuple = keys.add_tuple(&[a, twin, a, pair, pair, empty, the_parent, none, yes, no, half])?;
    let extra = Some((&keys, tuple));
    let pickle = "284b014b024b034b047494288c026162948c02616294680268024b01869468042968004e8889473fe00000000000007494";
    let wanted = format!("80059557000000000000004320{PARENT_HEX}94{pickle}87942e");
    assert_eq!(encoding::<Pickler>(parent(), &[1, 2, 3, 4], extra), wanted);
    let cbor = format!("84010203048b62616262616262616282626162018262616201805820{PARENT_HEX}f6f5f4f93800");
    assert_eq!(encoding::<CborWriter>(parent(), &[1, 2, 3, 4], extra), format!("835820{PARENT_HEX}{cbor}"));
    Ok(())
}

#[test]
fn the_parent_object_is_only_the_first_block_s() -> Result<()> {
    let tokens = [1, 2];
    let mut shared = ExtraKeys::new();
    let id = shared.add_parent(&parent())?;
    let mut apart = ExtraKeys::new();
    let copy = apart.add_bytes(parent().as_bytes())?;
    for (keys, id) in [(&mut shared, id), (&mut apart, copy)] {
        let tuple = keys.add_tuple(&[id])?;
        keys.push_block(None)?;
        keys.push_block(Some(tuple))?;
    }
    let hash = |keys| hash_blocks(HashAlgo::Sha256, &tokens, 1, parent(), Some(keys));
    assert_eq!(hash(&shared)?, hash(&apart)?);
    let other = BlockHash::new(&[9; 32])?;
    assert!(hash_blocks(HashAlgo::Sha256, &tokens, 1, other, Some(&shared)).is_err());
    Ok(())
}

#[test]
fn more_than_256_numbers() -> Result<()> {
    let hash = hash_with(HashAlgo::Sha256, &[1], |keys| {
        let ids: Vec<_> = (0..300).map(|at| keys.add_str(&format!("x{at}"))).collect::<Result<_>>()?;
        Ok(vec![keys.add_tuple(&ids)?, ids[0], ids[252], ids[253], ids[299]])
    });
    assert_eq!(hash?, "bb41ee8750e2f58bccc700728ed6991882101e886af37c6d9949af03f977ffe6");
    Ok(())
}

#[test]
fn integers_beyond_64_bits() -> Result<()> {
    let mut two_2039 = vec![0; 256];
    two_2039[254] = 0x80;
    let mut below = vec![0xff; 255];
    below[254] = 0x7f;
    let cases: [(&[u8], &str, &str); 5] = [
        // 2**63, with a redundant byte
        (
            &[0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0],
            "3dea35aa31d56fe4094c3ffbee707b31f21868e529395580dead720bdc5bd81c",
            "db3a86cff3df3cddb486a6bd3d3a2658866153f7b409d77725365601a1e88972",
        ),
        // -2**64
        (
            &[0, 0, 0, 0, 0, 0, 0, 0, 0xff],
            "68f96c1d3dd0f217eda2ded7f4b00b0c49ad6154c382152549f35b4b84e7cd19",
            "1600ebd166812c1a7f44dc8157aa4f486297304d4d44fd68f409a47e94574fc5",
        ),
        // -2**64 - 1
        (
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, 0xff],
            "bdadab68ceae5bc75413f87f3d2d6f37e20ef3599618316b031c8d07df67d1a4",
            "1a3e97935270703f8051519514592c6ec3f92361e3924fd3b3c0ac704bfb26a6",
        ),
        // 2**2039 - 1 and 2**2039: on either side of the longest short form
        (
            &below,
            "e90155bce636c5d4e4bc4b5d4f43c44f7080bd2b8259a0427abec7c894804e53",
            "1f6d11d654a22c380209bc0fa39ac0bf8db0f0b845ae525d79a79a5ca373ce67",
        ),
        (
            &two_2039,
            "50440ef8283bd426b2cae7640809f608e4f0f74874306930905367345a95da8e",
            "193c3c9eaf931ecb7633157bf9e84d12a19059c6ff7619327a959f6b64d59950",
        ),
    ];
    for (digits, pickle, cbor) in cases {
        let hash = |algo| hash_with(algo, &[1], |keys| Ok(vec![keys.add_int_from_le_bytes(digits)?]));
        assert_eq!(hash(HashAlgo::Sha256)?, pickle);
        assert_eq!(hash(HashAlgo::Sha256Cbor)?, cbor);
    }
    Ok(())
}

#[test]
fn small_integers_from_bytes_are_plain_ones() -> Result<()> {
    for (digits, value) in [(&[][..], 0), (&[0xff, 0xff], -1), (&[0x80, 0], 128), (&[0, 0x80, 0xff], -32768)] {
        let from_bytes = hash_with(HashAlgo::Sha256, &[1], |keys| Ok(vec![keys.add_int_from_le_bytes(digits)?]))?;
        assert_eq!(from_bytes, hash_with(HashAlgo::Sha256, &[1], |keys| Ok(vec![keys.add_int(value)?]))?, "{value}");
    }
    Ok(())
}

#[test]
fn floats_take_their_shortest_form() -> Result<()> {
    let two = |exponent| f64::powi(2.0, exponent);
    let odd_nan = f64::from_bits(0xfff4_0000_0000_0001);
    let floats = [
        [0.0, -0.0, 1.0, 65504.0, 65536.0, two(-14), two(-24), two(-25)],
        [two(-24) + two(-25), two(-149), 0.1, 1e300, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, odd_nan],
    ]
    .concat();
    let mut keys = ExtraKeys::new();
    let ids: Vec<_> = floats.iter().map(|value| keys.add_float(*value)).collect::<Result<_>>()?;
    let tuple = keys.add_tuple(&ids)?;
    let cbor = "810190f90000f98000f93c00f97bfffa47800000f90400f90001fa33000000fa33c00000fa00000001\
                fb3fb999999999999afb7e37e43c8800759cf97c00f9fc00f97e00f97e00";
    let wanted = format!("835820{PARENT_HEX}{cbor}");
    assert_eq!(encoding::<CborWriter>(parent(), &[1], Some((&keys, tuple))), wanted);
    Ok(())
}

#[test]
fn blocks_longer_than_a_frame() -> Result<()> {
    // The first ends in one frame, the second exactly fills it, the others need more.
    for (count, wanted) in [
        (13106, "10e62be29e9961832b68f41ccc9642e7037673d16e863f81206ba6fcd953b82a"),
        (13107, "dbdb7d3293960d8e48b43c8569a5ab78c0fdfb32646295baad31e4b65a92f424"),
        (13108, "21be06f80f20582dd36a9fb28e3828eccadd6d1c4872a52ed778e03cd296594d"),
        (16384, "97fc132160da501458b73fa36b6c3738ff6584e5486bad9d2fb45d9d67e0038a"),
        (40000, "96a6c47919cb0fa7c946556f45f83bafa169e90ae4deabf04e56040373536eca"),
    ] {
        let tokens: Vec<i64> = (70000..70000 + count).collect();
        let hashes = hash_blocks(HashAlgo::Sha256, &tokens, tokens.len(), parent(), None)?;
        assert_eq!(hex(hashes[0].as_bytes()), wanted, "{count} tokens");
    }
    let tokens: Vec<i64> = (0..16384).map(|at| i64::MAX - at).collect();
    let hashes = hash_blocks(HashAlgo::Xxhash, &tokens, tokens.len(), parent(), None)?;
    assert_eq!(hex(hashes[0].as_bytes()), "da7f658caca89691c51aa20fecbb167c");
    Ok(())
}

#[test]
fn payloads_as_long_as_a_frame_stand_alone() -> Result<()> {
    for (len, wanted) in [
        (65535, "aa8af19723d661a9931858e87f364e8bdec53e7172beae3d680d379d5b98a156"),
        (65536, "d1a20ee4b192702e7b2f2e9097ffd6e743c905516d66f0c943e0ddfc802ecdbe"),
        (65537, "acf5b90715ef8879d8af8f42498aa37b6a8b085aef39ad0983ebf323074c297b"),
    ] {
        let hash = hash_with(HashAlgo::Sha256, &[1], |keys| {
            Ok(vec![keys.add_str(&"y".repeat(len))?, keys.add_bytes(&vec![7; len])?, keys.add_str("z")?])
        });
        assert_eq!(hash?, wanted, "{len} bytes");
    }
    // What follows the payload here is too short for a frame of its own.
    let seed = none_hash(HashAlgo::Sha256, &"s".repeat(65536))?;
    assert_eq!(hex(seed.as_bytes()), "6a9c809ce84e4e489db2302b4bc559a71e9e1963e8108426d81553f2c3f1a251");
    Ok(())
}

#[test]
fn chains_and_seeds_of_every_algorithm() -> Result<()> {
    let wanted = [
        [
            "39b0d976d787774603b84a334e547a76ee6de68e22fda55fa99ec66a480e44d2",
            "6cd048a89aae461f0c492233a607504c1f9bf93df41db3b325fb3380ca9f2cfd",
            "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
            "3279c4b947f331d055c47442171c9ea17712596bd7fe094c31d4a5d432b42d68",
        ],
        [
            "11a3ba6a8c10aaa32918b09da5c8fe232f3796db57f6335dad5d5cca67869776",
            "e36961bd856fc50889fa74deb4101da3f785a57e5fbd09c146e6d89fa0a37c66",
            "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
            "8d33f520a3c4cef80d2453aef81b612bfe1cb44c8b2025630ad38662763f13d3",
        ],
        [
            "2a66d84384429a9dd5c4db68b7b8bdd0",
            "4e959505f399c757e13b0f465d4490e7",
            "6fb31cc38bba6066183f7f2104b9c051",
            "6b3b164a79fc6c08c6efa28fc1922294",
        ],
        [
            "430db8f220fc10056d59eadd255ef2ad",
            "42a2dc9c5582a65c4111a62ed40a1d1d",
            "1ebe36576dcb573f26b99533a20aaeca",
            "902bbcf97174df1ea0a482954fa7b32a",
        ],
    ];
    // The last two tokens do not fill a block.
    let tokens: Vec<i64> = (1000..1010).collect();
    for (algo, wanted) in HashAlgo::ALL.into_iter().zip(wanted) {
        let mut got = hash_blocks(algo, &tokens, 4, parent(), None)?;
        let (first, rest) = (got[0], hash_blocks(algo, &tokens[4..], 4, got[0], None)?);
        assert_eq!(rest[0], got[1], "continued from {first:?}");
        got.extend([none_hash(algo, "0")?, none_hash(algo, "")?]);
        assert_eq!(got.iter().map(|hash| hex(hash.as_bytes())).collect::<Vec<_>>(), wanted, "{}", algo.name());
        assert_eq!(HashAlgo::from_name(algo.name())?, algo);
    }
    Ok(())
}

#[test]
fn bad_input_is_refused() -> Result<()> {
    let refused = |result: Result<Vec<BlockHash>>| matches!(result, Err(Error::Config(_)));
    assert!(refused(hash_blocks(HashAlgo::Sha256, &[1], 0, parent(), None)));
    let mut keys = ExtraKeys::new();
    assert!(refused(hash_blocks(HashAlgo::Sha256, &[1], 1, parent(), Some(&keys))));
    assert!(HashAlgo::from_name("md5").is_err());
    let text = keys.add_str("not a tuple")?;
    assert!(keys.push_block(Some(text)).is_err());
    let foreign = ExtraKeys::new().add_tuple(&[text]);
    assert!(foreign.is_err());

    let mut tuple = keys.add_tuple(&[])?;
    for _ in 1..MAX_NESTING {
        // Its full form doubles with every level.
        tuple = keys.add_tuple(&[tuple, tuple])?;
    }
    assert!(keys.add_tuple(&[tuple]).is_err());
    keys.push_block(Some(tuple))?;
    assert!(hash_blocks(HashAlgo::Sha256, &[1], 1, parent(), Some(&keys)).is_ok());
    assert!(refused(hash_blocks(HashAlgo::Sha256Cbor, &[1], 1, parent(), Some(&keys))));
    Ok(())
}
