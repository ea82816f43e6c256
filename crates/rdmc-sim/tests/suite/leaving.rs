//! Nodes that leave while others are slow.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use futures::future::join;
use rdmc::{Algorithm, FailureCause, GroupError, GroupSpec, Node, NodeId, Shutdown};
use rdmc_sim::{ClusterModel, Deployment, NodeIndex, Simulation};

async fn join_in_vain(node: Node, spec: GroupSpec) -> Vec<(NodeId, FailureCause)> {
    let failure = match node.join_group(spec).await {
        Ok(receiver) => receiver.failed().await,
        Err(GroupError::Failed(failure)) => failure,
        Err(error) => panic!("the root leaves: {error}"),
    };
    failure.failed.into_iter().map(|it| (it.node, it.cause)).collect()
}

#[test]
fn who_leaves_is_named_alone_although_somebody_does_not_poll_what_joins_the_group() {
    let simulation = Simulation::new(ClusterModel::new(3, 1_000, 10_000), 1).expect("the model is valid");
    let world = simulation.world().clone();
    let played = simulation.run(Duration::from_secs(1_000), async move {
        let deployment = Deployment::start(&world).await.expect("nothing is in its way");
        let nodes: Vec<Node> = world.nodes().map(|node| deployment.node(node).clone()).collect();
        let spec = GroupSpec::new(1, (0..3).map(NodeId)).algorithm(Algorithm::Sequential);
        let mut lazy = Box::pin(join_in_vain(nodes[2].clone(), spec.clone()));
        poll_fn(|context| match lazy.as_mut().poll(context) {
            Poll::Ready(failed) => panic!("nothing has happened: {failed:?}"),
            Poll::Pending => Poll::Ready(()),
        })
        .await;
        let root = async {
            let joining = nodes[0].create_group(spec.clone());
            let leaving = async {
                world.sleep(Duration::from_millis(1)).await;
                nodes[0].clone().shutdown(Shutdown::Abort).await
            };
            join(joining, leaving).await
        };
        let began = world.now();
        let ((created, _), failed) = join(root, join_in_vain(nodes[1].clone(), spec.clone())).await;
        let failure = match created {
            Ok(sender) => sender.failed().await,
            Err(GroupError::Failed(failure)) => failure,
            Err(error) => panic!("it was left: {error}"),
        };
        assert!(world.now().since(began) < Duration::from_secs(1), "all have answered at once");
        let named: Vec<_> = failure.failed.into_iter().map(|it| (it.node, it.cause)).collect();
        assert_eq!(named, [(NodeId(0), FailureCause::Abandoned)]);
        assert_eq!(failed, named);
        assert_eq!(lazy.await, named);
        assert!(world.is_alive(NodeIndex(0)));
    });
    played.expect("the simulation ends");
}
