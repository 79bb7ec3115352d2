//! smoke
use lockkeeper_core::*;
use std::time::Duration;
#[tokio::test(start_paused = true)]
async fn basic() {
    let k = Keeper::new(Memory::new());
    let m = k.mutex("a");
    let g = m.lock().await.unwrap();
    assert!(g.is_held());
    assert!(m.try_lock().await.unwrap().is_none());
    let m2 = m.clone();
    let w = tokio::spawn(async move { m2.lock().await.unwrap().fence() });
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert!(g.is_held());
    let f = g.fence();
    assert_eq!(g.release().await.unwrap(), ReleaseOutcome::Released);
    assert!(w.await.unwrap() > f);
    k.close().await;
    assert!(k.inspect().unwrap().list("").await.unwrap().is_empty());
    let h = tokio::spawn({ let k = Keeper::new(Memory::new()); async move { k.with_lock("x", async |g| { tokio::task::yield_now().await; g.fence() }).await } });
    assert!(h.await.unwrap().unwrap().is_some());
}
#[tokio::test]
async fn speed() {
    let k = Keeper::new(Memory::new());
    let m = k.mutex("a");
    for _ in 0..3 {
    let t = std::time::Instant::now();
    for _ in 0..100000 { m.lock().await.unwrap().release().await.unwrap(); }
    println!("lock+release {:?}", t.elapsed()/100000);
    }
    let t = std::time::Instant::now();
    for _ in 0..100000 { std::hint::black_box(Owner::random()); }
    println!("owner {:?}", t.elapsed()/100000);
    let t = std::time::Instant::now();
    for _ in 0..100000 { std::hint::black_box(std::time::Instant::now()); }
    println!("instant {:?}", t.elapsed()/100000);
    let t = std::time::Instant::now();
    for _ in 0..100000 { std::hint::black_box(rustix::time::clock_gettime(rustix::time::ClockId::Boottime)); }
    println!("boottime {:?}", t.elapsed()/100000);
    let t = std::time::Instant::now();
    for _ in 0..100000 { std::hint::black_box(rustix::time::clock_gettime(rustix::time::ClockId::Monotonic)); }
    println!("mono {:?}", t.elapsed()/100000);
    for _ in 0..3 {
    let t = std::time::Instant::now();
    for i in 0..100000 { m.lock().await.unwrap().release().await.unwrap(); if i%64==0 {tokio::task::yield_now().await} }
    println!("lock+release yield {:?}", t.elapsed()/100000);
    }
    let t = std::time::Instant::now();
    for i in 0..100000 { tokio::spawn(async {}); if i%64==0 {tokio::task::yield_now().await} }
    println!("spawn {:?}", t.elapsed()/100000);
    let t = std::time::Instant::now();
    for i in 0..100000 { std::hint::black_box(tokio_util::sync::CancellationToken::new()); }
    println!("token {:?}", t.elapsed()/100000);
}
