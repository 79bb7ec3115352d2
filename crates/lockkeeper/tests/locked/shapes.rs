//! Signatures that `#[locked]` accepts, and its options.

use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

use lockkeeper::{ErrorKind, Keeper, Mode, Result, locked};

use crate::common::{AppError, held, is_free, keeper};

struct Order {
    id: u64,
    lines: (u32, &'static str),
}

struct Shop {
    keeper: Keeper,
    name: String,
    paid: u64,
}

fn shop() -> Shop {
    Shop { keeper: keeper(), name: "north".to_owned(), paid: 0 }
}

impl Shop {
    #[locked(key = "{self.name}/{order.id}", keeper = "self.keeper")]
    async fn by_reference(&self, order: &Order) -> Result<Vec<String>, AppError> {
        Ok(held(&self.keeper).await)
    }

    /// Has a doc comment and another attribute.
    #[locked(key = "{self.name}/{cents}", keeper = "&self.keeper")]
    #[inline]
    pub(crate) async fn by_mutable_reference(&mut self, cents: u64) -> Result<u64, AppError> {
        self.paid += cents;
        assert_eq!(held(&self.keeper).await, [format!("north/{cents}")]);
        Ok(self.paid)
    }

    #[locked(key = "{self.name}", keeper = "self.keeper.clone()")]
    async fn by_value(self) -> Result<(Self, Vec<String>), AppError> {
        let held = held(&self.keeper).await;
        Ok((self, held))
    }

    #[locked(key = "{self.name}", keeper = "self.keeper")]
    async fn in_an_arc(self: Arc<Self>) -> Result<String, AppError> {
        Ok(held(&self.keeper).await.concat())
    }

    #[locked(key = "borrowed", keeper = "self.keeper")]
    async fn borrowed<'a>(&'a self, other: &'a str) -> Result<&'a str, AppError> {
        Ok(if other.is_empty() { &self.name } else { other })
    }

    #[locked(key = "elided", keeper = "self.keeper")]
    async fn elided(&self) -> Result<&str, AppError> {
        Ok(&self.name)
    }

    #[locked(key = "elided", keeper = "self.keeper")]
    fn elided_blocking(&mut self) -> Result<&mut String, AppError> {
        Ok(&mut self.name)
    }
}

#[tokio::test]
async fn methods_may_have_any_receiver() {
    let mut shop = shop();
    let order = Order { id: 7, lines: (0, "") };
    assert_eq!(shop.by_reference(&order).await.unwrap(), ["north/7"]);
    assert_eq!(shop.by_mutable_reference(5).await.unwrap(), 5);
    assert_eq!(shop.by_mutable_reference(6).await.unwrap(), 11);
    let (mut shop, held) = shop.by_value().await.unwrap();
    assert_eq!(held, ["north"]);
    assert_eq!(shop.borrowed("south").await.unwrap(), "south");
    assert_eq!(shop.borrowed("").await.unwrap(), "north");
    assert_eq!(shop.elided().await.unwrap(), "north");
    assert_eq!(shop.elided_blocking().unwrap(), "north");
    assert_eq!(Arc::new(shop).in_an_arc().await.unwrap(), "north");
}

#[locked(key = "{a}/{b}/{order.lines}/{id}/{type}/{rest.0}", keeper = "keeper")]
async fn patterns(
    keeper: &Keeper,
    (a, mut b): (u8, u8),
    Order { id, lines: _ }: Order,
    order: Lines,
    r#type: impl Display,
    rest: (char,),
    _: u8,
) -> Result<Vec<String>> {
    b += 1;
    assert_eq!((a, b, id, rest.0), (1, 3, 4, 'x'));
    let _ = (r#type, order);
    Ok(held(keeper).await)
}

struct Lines {
    lines: u32,
}

#[tokio::test]
async fn keys_use_arguments_from_patterns_and_of_any_type() {
    let order = Order { id: 4, lines: (0, "") };
    assert_eq!(order.lines, (0, ""));
    let lines = Lines { lines: 9 };
    let held = patterns(&keeper(), (1, 2), order, lines, "odd {}", ('x',), 0).await;
    assert_eq!(held.unwrap(), ["1/2/9/4/odd {}/x"]);
}

#[locked(key = "{{{name}}}", keeper = "keeper")]
async fn generic<'k, T, const N: usize>(
    keeper: &'k Keeper,
    name: T,
    _numbers: [u8; N],
) -> Result<(T, &'k Keeper), lockkeeper::Error>
where
    T: Display + Clone + Debug,
{
    assert_eq!(held(keeper).await, [format!("{{{name}}}")]);
    Ok((name, keeper))
}

#[tokio::test]
async fn a_generic_function_keeps_its_bounds_and_lifetimes() {
    let keeper = keeper();
    assert_eq!(generic(&keeper, "a", [0; 3]).await.unwrap().0, "a");
    assert_eq!(generic(&keeper, 5_u8, []).await.unwrap().0, 5);
}

/// The arguments have names that the generated code might use.
#[locked(key = "{keeper}/{wanted}/{returned}", keeper = "store")]
async fn odd_names(store: Keeper, keeper: u8, wanted: u8, returned: u8) -> Result<Vec<String>> {
    let _ = (keeper, wanted, returned);
    Ok(held(&store).await)
}

#[locked(key = "{keeper}/{wanted}", keeper = "store")]
fn odd_names_blocking(store: Keeper, keeper: u8, wanted: u8) -> Result<String> {
    let _ = (keeper, wanted);
    Ok(store.inspect()?.blocking_list("")?[0].name.to_string())
}

#[tokio::test]
async fn arguments_may_have_any_name() {
    assert_eq!(odd_names(keeper(), 1, 2, 3).await.unwrap(), ["1/2/3"]);
    let keeper = Keeper::new(lockkeeper::Memory::new());
    assert_eq!(odd_names_blocking(keeper, 1, 2).unwrap(), "1/2");
}

#[locked(key = "iterator", keeper = "keeper")]
async fn returns_an_iterator(
    keeper: &Keeper,
) -> Result<impl Iterator<Item = u8> + use<>, AppError> {
    is_free(keeper, "else").await.then_some(()).ok_or(AppError::Declined)?;
    Ok([1, 2].into_iter())
}

#[locked(key = "iterator", keeper = "keeper")]
fn returns_an_iterator_blocking(
    keeper: &Keeper,
) -> Result<impl Iterator<Item = u8> + use<>, AppError> {
    Ok([1, 2].into_iter())
}

#[tokio::test]
async fn a_result_may_contain_an_unnameable_type() {
    assert_eq!(returns_an_iterator(&keeper()).await.unwrap().sum::<u8>(), 3);
    assert_eq!(returns_an_iterator_blocking(&keeper()).unwrap().sum::<u8>(), 3);
}

trait Bookkeeping {
    async fn book(&self, account: u32) -> Result<String, AppError>;

    fn keeper(&self) -> &Keeper;

    #[locked(key = "default/{account}", keeper = "self.keeper()")]
    async fn book_by_default(&self, account: u32) -> Result<String, AppError> {
        Ok(held(self.keeper()).await.concat())
    }
}

impl Bookkeeping for Shop {
    #[locked(key = "{self.name}/{account}", keeper = "self.keeper()")]
    async fn book(&self, account: u32) -> Result<String, AppError> {
        Ok(held(&self.keeper).await.concat())
    }

    fn keeper(&self) -> &Keeper {
        &self.keeper
    }
}

#[tokio::test]
async fn methods_of_traits_are_locked() {
    assert_eq!(shop().book(3).await.unwrap(), "north/3");
    assert_eq!(shop().book_by_default(3).await.unwrap(), "default/3");
}

#[locked(key = "m", keeper = "keeper", mode = "shared", wait = "0s")]
async fn read(keeper: &Keeper) -> Result<()> {
    let reader = keeper.rw_lock("m").try_read().await?;
    assert_eq!(reader.unwrap().mode(), Mode::Shared);
    assert!(keeper.rw_lock("m").try_write().await?.is_none());
    Ok(())
}

#[locked(key = "m", keeper = "keeper", mode = "exclusive", wait = "0s")]
async fn write(keeper: &Keeper) -> Result<()> {
    assert!(keeper.rw_lock("m").try_read().await?.is_none());
    Ok(())
}

#[locked(key = "m", keeper = "keeper", permits = 2, wait = "0s")]
async fn one_of_two(keeper: &Keeper) -> Result<u32> {
    keeper.semaphore("m", 2).available().await
}

#[tokio::test]
async fn mode_and_permits_are_those_of_the_attribute() {
    let keeper = keeper();
    read(&keeper).await.unwrap();
    write(&keeper).await.unwrap();
    assert_eq!(one_of_two(&keeper).await.unwrap(), 1);
    let reader = keeper.rw_lock("m").read().await.unwrap();
    read(&keeper).await.unwrap();
    assert_eq!(write(&keeper).await.unwrap_err().kind(), ErrorKind::TimedOut);
    drop(reader);
    let all = keeper.semaphore("m", 2).acquire_many(2).await.unwrap();
    assert_eq!(one_of_two(&keeper).await.unwrap_err().kind(), ErrorKind::TimedOut);
    drop(all);
}

#[locked(key = "t", keeper = "keeper", ttl = "1m30s", wait = "2s")]
async fn remaining(keeper: &Keeper) -> Result<Option<Duration>> {
    let shown = keeper.inspect()?.show("t").await?;
    Ok(shown[0].holders[0].remaining)
}

#[tokio::test(start_paused = true)]
async fn ttl_and_wait_are_those_of_the_attribute() {
    let keeper = keeper();
    let left = remaining(&keeper).await.unwrap().unwrap();
    assert!(left > Duration::from_secs(80) && left <= Duration::from_secs(90), "{left:?}");
    let guard = keeper.mutex("t").lock().await.unwrap();
    let start = tokio::time::Instant::now();
    let error = remaining(&keeper).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= Duration::from_secs(2));
    let keeper = keeper.max_wait(Duration::ZERO);
    let waiting = tokio::spawn(async move { remaining(&keeper).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(guard);
    assert!(
        waiting.await.unwrap().unwrap().is_some(),
        "the attribute takes precedence over the keeper's max_wait"
    );
}

macro_rules! made {
    ($name:ident, $argument:ident) => {
        #[locked(key = "made:{x}", keeper = "keeper")]
        async fn $name(keeper: &Keeper, $argument: u8) -> Result<Vec<String>> {
            let _ = $argument;
            Ok(held(keeper).await)
        }
    };
}
made!(made, x);

#[tokio::test]
async fn a_function_generated_by_a_macro_is_locked() {
    assert_eq!(made(&keeper(), 3).await.unwrap(), ["made:3"]);
}

#[locked(key = "{name}", keeper = "keeper")]
async fn any_name(keeper: &Keeper, name: &str) -> Result<()> {
    let _ = name;
    Ok(())
}

#[tokio::test]
async fn a_rendered_key_that_is_not_a_valid_name_is_an_error() {
    for name in ["", "a\0b", &"x".repeat(1025)] {
        let error = any_name(&keeper(), name).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidName, "{name:?}");
    }
    any_name(&keeper(), &"é/{}".repeat(200)).await.unwrap();
}

fn is_send<T: Send>(value: T) -> T {
    value
}

#[tokio::test]
async fn the_future_is_send() {
    let shop = shop();
    let order = Order { id: 4, lines: (0, "") };
    is_send(shop.by_reference(&order)).await.unwrap();
    is_send(patterns(&keeper(), (1, 2), order, Lines { lines: 9 }, "", ('x',), 0)).await.unwrap();
    is_send(generic(&keeper(), "a", [0; 3])).await.unwrap();
    is_send(borrows_from_a_cell(&keeper(), &std::sync::Mutex::new(keeper()))).await.unwrap();
}

/// The borrow in the keeper expression ends before the first await.
#[locked(key = "a", keeper = "*other.lock().unwrap()")]
async fn borrows_from_a_cell(keeper: &Keeper, other: &std::sync::Mutex<Keeper>) -> Result<()> {
    assert!(held(keeper).await.is_empty());
    assert!(other.try_lock().is_ok());
    Ok(())
}
