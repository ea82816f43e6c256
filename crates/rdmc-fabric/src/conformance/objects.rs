//! Objects that nodes have in common.

use super::{Harness, assert_pattern};
use crate::memory::{AttachError, ObjectDescriptor, SharedObject};

pub(super) async fn objects_are_shared_where_the_fabric_says_so(harness: &Harness) {
    let (_a, _b) = harness.connected().await;
    let (owner, peer) = (&harness.a.node.fabric, &harness.b.node.fabric);
    let object = SharedObject::copy_of(&harness.a.filled(10_000, 1)).expect("there is memory");
    if !owner.capabilities().shares_objects {
        assert!(owner.share(&object).is_err());
        let unknown = ObjectDescriptor { len: 1, owner: 2, token: 3 };
        assert!(matches!(peer.attach(unknown).await, Err(AttachError::Unsupported { .. })));
        return;
    }
    let share = owner.share(&object).expect("it can be shared");
    let descriptor = share.descriptor();
    assert_eq!(descriptor.len, 10_000);
    let attached = peer.attach(descriptor).await.expect("it is shared");
    let by_itself = owner.attach(descriptor).await.expect("the owner can reach it too");
    for wrong in [
        ObjectDescriptor { token: descriptor.token ^ 1, ..descriptor },
        ObjectDescriptor { len: 9_999, ..descriptor },
        ObjectDescriptor { len: u64::MAX, ..descriptor },
    ] {
        assert!(peer.attach(wrong).await.is_err(), "no node shares {wrong:?}");
    }
    drop((share, object));
    assert!(matches!(peer.attach(descriptor).await, Err(AttachError::NotShared)));
    for bytes in [attached, by_itself] {
        assert_pattern(&bytes, 1);
    }
}
